"""Opens a run's folder: locking, recovery after a kill, and replacing a run by a reprocessed one.

A reprocessed run lives in the folder `next` of the old one (see `RunFolder`) and replaces it when complete.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.files import remove_temporaries, sync_folder, temporary_name, try_lock
from virnuc_core.inference.plan import read_plan
from virnuc_core.results.run_json import cleaned_on
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta

LOCK_NAME = ".virnuc.lock"
SHARD_FILES: Final = ("shard_*.h5*", ".shard_*.tmp")

_log = logging.getLogger(__name__)


@contextmanager
def open_run_folder(root: Path, *, force: bool) -> Iterator[RunFolder]:
    """Creates the folder if needed and locks it against other runs.

    Finishes or removes what a killed run has left: replacing a run is finished, temporary files are removed. `force` deletes what
    an earlier run wrote, but no files of other origin.

    Raises:
        UsageError: the path is not a folder, cannot be written, holds a `frames` folder that is not of a run, or another run
            is using it.
    """
    with locking(root):
        folder = RunFolder(root)
        _require_own_frames(folder)
        _take_in(folder)
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


def open_next(folder: RunFolder, *, force: bool) -> RunFolder:
    """The folder of the run that is to replace this one: an unfinished one unless `force`, or else a new one.

    Raises:
        DamagedFileError: there is no intact plan to begin from.
        UsageError: it is no predict run, it was cleaned, a file or folder is in the way, or the folders span file systems.
    """
    if day := cleaned_on(folder.report):
        raise UsageError(
            f"{folder.root} has no frames and shards to begin from: `virnuc clean` removed them on {day}. Run the command "
            "that made it again, which computes them anew."
        )
    if read_plan(folder.plan).kind != "predict":
        raise UsageError(
            f"{folder.root} holds an embed run, with one model: nothing of it could be kept. Run `virnuc embed` "
            "with another --out, or with --force."
        )
    for found in (folder.next, folder.incoming):
        if found.root.exists() and found.previous is None and any(found.root.iterdir()):
            raise UsageError(f"{found.root} is in the way: it is not of virnuc. Move it or rename it.")
    if force:
        drop_next(folder)
    folder.next.root.mkdir(exist_ok=True)
    if folder.next.previous is None:
        folder.next.link_frames()
        sync_folder(folder.next.root)
    # Files are moved by renaming, which is atomic only within a file system.
    device = folder.next.root.stat().st_dev
    for target in (folder.root, folder.shards, folder.lanes):
        if target.exists() and target.stat().st_dev != device:
            raise UsageError(
                f"{target} lies on another file system than {folder.root}, so a new run cannot be put in its place. "
                "Move it there, or run `virnuc predict` into another folder."
            )
    return folder.next


def drop_next(folder: RunFolder) -> None:
    """Deletes an unfinished replacement run, but not a folder that merely has its name."""
    if folder.next.previous is not None:
        _discard(folder.next)


def put_in_place(folder: RunFolder) -> None:
    """Replaces a run by its complete next run.

    The first rename commits: if killed after it, the next run to open the folder completes the replacement.
    """
    if folder.next.previous is not None:
        sync_folder(folder.next.root)
        folder.next.root.rename(folder.incoming.root)
        sync_folder(folder.root)
    _take_in(folder)


def _take_in(folder: RunFolder) -> None:
    """Moves the remaining files of the incoming run over those of the old one; safe to repeat after a kill."""
    incoming = folder.incoming
    if incoming.previous is None:
        return
    for stale in reversed(folder.timed):
        stale.unlink(missing_ok=True)
    shards, lanes = sorted(incoming.shards.glob("shard_*.h5")), sorted(incoming.lanes.glob("*-*.*"))
    for source in (incoming.plan, *shards, *lanes, *incoming.results):
        if source.exists():
            target = folder.root / source.relative_to(incoming.root)
            target.parent.mkdir(exist_ok=True)
            os.replace(source, target)
    for changed in (folder.shards, folder.lanes, folder.root):
        if changed.is_dir():
            sync_folder(changed)
    _discard(incoming)
    sync_folder(folder.root)
    _log.info("%s holds the new run now", folder.root)


def _discard(folder: RunFolder) -> None:
    """Deletes a folder; for others it disappears atomically."""
    temporary = temporary_name(folder.root)
    shutil.rmtree(temporary, ignore_errors=True)
    folder.root.rename(temporary)
    shutil.rmtree(temporary)


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
    drop_next(folder)
    # Without a plan, files named like results are not of a run.
    if folder.plan.exists():
        for path in folder.results:
            path.unlink(missing_ok=True)
        # Last, so that the folder is still recognised as a run if killed in between.
        folder.plan.unlink()


def _remove_leftovers(folder: RunFolder) -> None:
    """Removes temporaries of killed runs, of those files that only the holder of the lock writes."""
    remove_temporaries(folder.root, {path.name for path in (folder.plan, *folder.results)})
    for discarded in (folder.next, folder.incoming):
        shutil.rmtree(temporary_name(discarded.root), ignore_errors=True)
