"""Opens a run's folder: locking, and recovery after a kill."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.files import remove_temporaries, temporary_name, try_lock
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta

LOCK_NAME = ".virnuc.lock"
SHARD_FILES: Final = ("shard_*.h5*", ".shard_*.tmp")


@contextmanager
def open_run_folder(root: Path, *, force: bool) -> Iterator[RunFolder]:
    """Creates the folder if needed and locks it against other runs.

    Removes the temporary files of a killed run. `force` deletes what
    an earlier run wrote, but no files of other origin.

    Raises:
        UsageError: the path is not a folder, cannot be written, holds a `frames` folder that is not of a run, or another run
            is using it.
    """
    with locking(root):
        folder = RunFolder(root)
        _require_own_frames(folder)
        if force:
            _empty(folder)
        _remove_leftovers(folder)
        yield folder


@contextmanager
def locking(root: Path) -> Iterator[None]:
    """Creates the folder if needed and holds its lock; raises UsageError if that cannot be done."""
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
    # The lock is released when the process ends, even if killed.
    with lock:
        if not try_lock(lock):
            raise UsageError(f"another run works in {root}: wait for it, or choose another --out.")
        yield


def _require_own_frames(folder: RunFolder) -> None:
    """Refuses a folder that only has the name of a frame store: it would be replaced."""
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
    """Deletes by name, so that the user's own files are kept, also in the run's subfolders."""
    own_names = {
        folder.shards: SHARD_FILES,
        folder.lanes: ("lane-*.jsonl", "lane-*.log*", "plan-*.jsonl", folder.token.name),
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
    # Without a plan, files named like results are not of a run.
    if folder.plan.exists():
        for path in folder.results:
            path.unlink(missing_ok=True)
        # Last, so that the folder is still recognised as a run if killed in between.
        folder.plan.unlink()


def _remove_leftovers(folder: RunFolder) -> None:
    """Removes temporaries of killed runs, of those files that only the holder of the lock writes."""
    remove_temporaries(folder.root, {path.name for path in (folder.plan, *folder.results)})
