"""Who works in a run's folder, and what of an earlier run is thrown away."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from virnuc_core.atomic_write import remove_temporaries, temporary_name
from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.results.next_run import drop_next, remove_discarded, take_in
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.store_meta import StoreMeta

LOCK_NAME = ".virnuc.lock"


@contextmanager
def open_run_folder(root: Path, *, force: bool) -> Iterator[RunFolder]:
    """Makes the folder where needed and keeps every other run out of it.

    What a killed run has left half-done is finished (the move to a new run, see `next_run`) or removed.

    Args:
        root: the run's folder.
        force: delete what an earlier run wrote there; files that virnuc does not write are left alone.

    Raises:
        UsageError: the path is not a folder, cannot be written, holds a `frames` folder that is not of a run,
            or another run works there.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / LOCK_NAME).open("w")
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--out {root} is not a folder: choose another name.") from error
    except OSError as error:
        raise UsageError(
            f"--out {root} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    except ValueError as error:
        raise UsageError(f"--out {str(root)!r} can be the name of no folder: {error}.") from error
    # The lock ends with the process, however that ends.
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another run works in {root}: wait for it, or choose another --out.") from error
        folder = RunFolder(root)
        _require_own_frames(folder)
        take_in(folder)
        if force:
            _empty(folder)
        _clear_up(folder)
        yield folder


def _require_own_frames(folder: RunFolder) -> None:
    """A frame store is replaced as a whole, so what only has its name must not be taken for one."""
    if folder.plan.exists() or not folder.frames.exists():
        return
    try:
        StoreMeta.read(folder.frames)
    except DamagedFileError as error:
        raise UsageError(
            f"{folder.frames} is in the way: it is not a frame store, and {folder.root} has no plan of a run. "
            "Move it, or choose another --out."
        ) from error


def _empty(folder: RunFolder) -> None:
    """Deletes by name, so that a person's own files stay, also in the folders of the run."""
    own_names = {
        folder.shards: ("shard_*.h5*", ".shard_*.tmp"),
        folder.lanes: ("lane-*.jsonl", "plan-*.jsonl"),
        folder.sequences: ("genbank_*.fa", "genbank_*.tsv"),
        folder.training: ("records.tsv", "figures.json", "*.png"),
    }
    for parent, patterns in own_names.items():
        for path in [path for pattern in patterns for path in parent.glob(pattern)]:
            path.unlink()
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()
    shutil.rmtree(temporary_name(folder.frames), ignore_errors=True)
    if StoreMeta.is_in(folder.frames):
        shutil.rmtree(folder.frames)
    drop_next(folder)
    # Without a plan, files with the names of results are not those of a run.
    if folder.plan.exists():
        for path in folder.results:
            path.unlink(missing_ok=True)
        # Last: as long as it is there, a run that was killed in between still knows what it was.
        folder.plan.unlink()


def _clear_up(folder: RunFolder) -> None:
    """Removes what killed runs have left of files that only the holder of the lock writes."""
    remove_temporaries(folder.root, {path.name for path in (folder.plan, *folder.results)})
    remove_discarded(folder)
