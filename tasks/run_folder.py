"""Who works in a run's folder, and what of an earlier run is thrown away."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from virnuc_core.atomic_write import temporary_name
from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.run_plan import RunFolder
from virnuc_core.sequences.store_meta import StoreMeta

LOCK_NAME = ".virnuc.lock"


@contextmanager
def open_run_folder(root: Path, *, force: bool) -> Iterator[RunFolder]:
    """Makes the folder where needed and keeps every other run out of it.

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
    # The lock ends with the process, however that ends.
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another run works in {root}: wait for it, or choose another --out.") from error
        folder = RunFolder(root)
        _require_own_frames(folder)
        if force:
            _empty(folder)
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
    for pattern in ("shard_*.h5*", ".shard_*.tmp"):
        for path in folder.shards.glob(pattern):
            path.unlink()
    if folder.shards.is_dir() and not any(folder.shards.iterdir()):
        folder.shards.rmdir()
    shutil.rmtree(temporary_name(folder.frames), ignore_errors=True)
    if StoreMeta.is_in(folder.frames):
        shutil.rmtree(folder.frames)
    # Without a plan, files with the names of results are not those of a run.
    if folder.plan.exists():
        for path in result_files(folder):
            path.unlink(missing_ok=True)
        # Last: as long as it is there, a run that was killed in between still knows what it was.
        folder.plan.unlink()


def result_files(folder: RunFolder) -> tuple[Path, ...]:
    """What a finished run leaves for its user."""
    return (
        folder.predictions,
        folder.contigs,
        folder.prediction_results,
        folder.highest_score,
        folder.embeddings,
        folder.rejected,
        folder.report,
    )
