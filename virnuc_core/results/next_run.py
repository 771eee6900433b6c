"""A run that another one is moved to: made beside it, and put in its place when it is whole."""

import logging
import os
import shutil
from pathlib import Path

from virnuc_core.errors import UsageError
from virnuc_core.files import sync_folder, temporary_name
from virnuc_core.inference.plan import read_plan
from virnuc_core.run_folder import RunFolder

_log = logging.getLogger(__name__)


def open_next(folder: RunFolder, *, force: bool) -> RunFolder:
    """The folder of the run that this one is moved to: the one that was begun, or a new one.

    Args:
        folder: a run that nobody else works in.
        force: throw away what was begun.

    Raises:
        DamagedFileError: there is no whole plan to begin from.
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
    _require_one_file_system(folder)
    return folder.next


def drop_next(folder: RunFolder) -> None:
    """Throws away a run that was begun to be moved to; not a folder that only has its name."""
    if folder.next.previous is not None:
        _discard(folder.next)


def put_in_place(folder: RunFolder) -> None:
    """Puts a run that is whole in the place of the one around it; the old one is gone then.

    The first rename decides: whoever opens the folder after it goes on with the others.
    """
    if folder.next.previous is not None:
        sync_folder(folder.next.root)
        folder.next.root.rename(folder.incoming.root)
        sync_folder(folder.root)
    take_in(folder)


def take_in(folder: RunFolder) -> None:
    """Moves the files of a whole run over those of the run around it, or what is left of them after a kill."""
    incoming = folder.incoming
    if incoming.previous is None:
        return
    for telling in (folder.report, folder.page):  # of the old results
        telling.unlink(missing_ok=True)
    for source in _files(incoming):
        target = folder.root / source.relative_to(incoming.root)
        if not target.parent.is_dir():
            target.parent.mkdir()
        os.replace(source, target)
    for changed in (folder.shards, folder.lanes, folder.root):
        if changed.is_dir():
            sync_folder(changed)
    _discard(incoming)
    sync_folder(folder.root)
    _log.info("%s holds the new run now", folder.root)


def remove_discarded(folder: RunFolder) -> None:
    """Removes what a killed run was about to remove."""
    for discarded in (folder.next, folder.incoming):
        shutil.rmtree(temporary_name(discarded.root), ignore_errors=True)


def _discard(folder: RunFolder) -> None:
    """Removes a folder all at once, as far as anybody can see."""
    temporary = temporary_name(folder.root)
    shutil.rmtree(temporary, ignore_errors=True)
    folder.root.rename(temporary)
    shutil.rmtree(temporary)


def _files(folder: RunFolder) -> list[Path]:
    """What makes a run, apart from its frames: the plan, the shards, the journals and the results."""
    shards, lanes = sorted(folder.shards.glob("shard_*.h5")), sorted(folder.lanes.glob("*.jsonl"))
    files = [folder.plan, *shards, *lanes, *folder.results]
    return [path for path in files if path.exists()]


def _require_one_file_system(folder: RunFolder) -> None:
    """Files are moved by renaming, which cannot stop half-way."""
    device = folder.next.root.stat().st_dev
    for target in (folder.root, folder.shards, folder.lanes):
        if target.exists() and target.stat().st_dev != device:
            raise UsageError(
                f"{target} lies on another file system than {folder.root}, so a new run cannot be put in its place. "
                "Move it there, or run `virnuc predict` into another folder."
            )
