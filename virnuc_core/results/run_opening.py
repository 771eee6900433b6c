"""Opening a run's folder: one run at a time, what is left of earlier runs, and the move of a run to new settings.

A run that is reprocessed has the new run in its own folder `next` (see `RunFolder`). When that is complete, it is put in
the place of the old one.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.files import remove_temporaries, sync_folder, temporary_name
from virnuc_core.inference.plan import read_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta

LOCK_NAME = ".virnuc.lock"

_log = logging.getLogger(__name__)


@contextmanager
def open_run_folder(root: Path, *, force: bool) -> Iterator[RunFolder]:
    """Makes the folder where needed and keeps every other run out of it.

    What a killed run has left half-done is finished (the move to a new run) or removed.

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
        _take_in(folder)
        if force:
            _empty(folder)
        _remove_leftovers(folder)
        yield folder


def open_next(folder: RunFolder, *, force: bool) -> RunFolder:
    """The folder of the run that this one is moved to: the one that was begun, or a new one.

    Args:
        folder: an open run.
        force: throw away what was begun.

    Raises:
        DamagedFileError: there is no intact plan to begin from.
        UsageError: it is no predict run, or something else has the name of a folder that is needed.
    """
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
    # Files are moved by renaming, which cannot stop half-way.
    device = folder.next.root.stat().st_dev
    for target in (folder.root, folder.shards, folder.lanes):
        if target.exists() and target.stat().st_dev != device:
            raise UsageError(
                f"{target} lies on another file system than {folder.root}, so a new run cannot be put in its place. "
                "Move it there, or run `virnuc predict` into another folder."
            )
    return folder.next


def drop_next(folder: RunFolder) -> None:
    """Throws away a run that was begun to be moved to; not a folder that only has its name."""
    if folder.next.previous is not None:
        _discard(folder.next)


def put_in_place(folder: RunFolder) -> None:
    """Puts a complete next run in the place of the one around it; the old one is gone then.

    The first rename decides: whoever opens the folder after it goes on with the others.
    """
    if folder.next.previous is not None:
        sync_folder(folder.next.root)
        folder.next.root.rename(folder.incoming.root)
        sync_folder(folder.root)
    _take_in(folder)


def _take_in(folder: RunFolder) -> None:
    """Moves the files of a complete run over those of the run around it, or what is left of them after a kill."""
    incoming = folder.incoming
    if incoming.previous is None:
        return
    for stale in (folder.report, folder.page):
        stale.unlink(missing_ok=True)
    shards, lanes = sorted(incoming.shards.glob("shard_*.h5")), sorted(incoming.lanes.glob("*.jsonl"))
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
    """Removes a folder; to others it vanishes all at once."""
    temporary = temporary_name(folder.root)
    shutil.rmtree(temporary, ignore_errors=True)
    folder.root.rename(temporary)
    shutil.rmtree(temporary)


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


def _remove_leftovers(folder: RunFolder) -> None:
    """Removes what killed runs have left of files that only the holder of the lock writes."""
    remove_temporaries(folder.root, {path.name for path in (folder.plan, *folder.results)})
    for discarded in (folder.next, folder.incoming):
        shutil.rmtree(temporary_name(discarded.root), ignore_errors=True)
