"""Fetching models ahead of time, for machines that will not reach the model hub, and copying them to a folder."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import sync_file, sync_folder
from virnuc_core.models.catalogue import HubCommit, find_entries, require_known_model, split_family
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.checksums import write_sums
from virnuc_core.models.hub import fetch
from virnuc_core.models.verification import Verification, verify
from virnuc_core.specs import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """One model that is on this machine now.

    Attributes:
        name: as it was asked for.
        family: its architecture.
        location: where it lies: in the hub's cache, or in this package.
        revision: commit of its repository; None for a bundled model.
        fingerprint: SHA-256 (hex) that plans and runs know it by.
        hashes_from: where the hashes of its files are known from; empty when none are.
        copy: folder of the copy that was asked for.
    """

    name: str
    family: Family
    location: Path
    revision: str | None
    fingerprint: str
    hashes_from: str
    copy: Path | None = None

    @property
    def path(self) -> Path:
        """What to give as the model: the copy where there is one."""
        return self.copy or self.location


def pull(name: str, to: Path | None) -> Pulled:
    """Fetches one model unless it is here, reads all of it, and copies it if that is asked for.

    Args:
        name: catalogue name, with or without `esm2:` or `dnabert:`, or OWNER/NAME on the hub.
        to: folder in which the copy gets a folder of its own.

    Raises:
        UsageError: the name is that of two models, or the copy cannot be made there.
        CheckpointError: there is no such model, it cannot be fetched, or what was fetched is not whole.
    """
    family, short = split_family(name)
    require_known_model(short, family)
    entries = find_entries(short, family)
    if len(entries) > 1:
        raise UsageError(f"{name} is the name of two models: give esm2:{name} or dnabert:{name}.")
    if not entries and os.path.exists(os.path.expanduser(short)):
        raise UsageError(f"{name} is a path, and on this machine already: virnuc models verify reads it.")
    source = entries[0].source if entries else HubCommit(short, "")
    if isinstance(source, HubCommit):
        location = fetch(source.repo, source.revision or None)
        # The hub's cache names a snapshot by its commit.
        revision = location.name
    else:
        location, revision = source, None
    found = _whole(entries[0].qualified_name if entries else str(location))
    copy = None
    if to is not None:
        copy = _copied(found, to / (short.rpartition("/")[2] if revision else location.name))
    return Pulled(
        name=name,
        family=resolve_checkpoint(str(location), family).family,
        location=location,
        revision=revision,
        fingerprint=found.fingerprint,
        hashes_from=found.hashes_from,
        copy=copy,
    )


def _copied(found: Verification, folder: Path) -> Path:
    """A folder of plain files with a list of their hashes; one that is there and whole is left as it is."""
    assert found.location is not None  # it was verified
    if os.path.lexists(folder):
        there = verify(str(folder))
        if not there.is_whole or there.fingerprint != found.fingerprint:
            raise UsageError(
                f"{folder} is in the way and is not this model, whole: delete it, or give another --to."
            )
        return folder
    checkpoint = resolve_checkpoint(str(found.location), None)
    files = [path for path in (*checkpoint.files, checkpoint.config, checkpoint.tokenizer) if path]
    files += found.location.glob("*.index.json")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        for path in files:
            shutil.copyfile(path, made / path.name)
        write_sums(made, (path for path in made.iterdir()))
        for path in made.iterdir():
            sync_file(path)
        os.replace(made, folder)
    sync_folder(folder.parent)
    _whole(str(folder))
    return folder


def _whole(name_or_path: str) -> Verification:
    found = verify(name_or_path)
    if found.is_whole:
        return found
    folder = found.location
    if folder is not None and folder.parent.name == "snapshots":  # of the hub's cache, whose files are links
        folder = folder.parents[1]
    problems = "; ".join(problem.rstrip(".") for problem in found.problems)
    raise CheckpointError(
        f"{name_or_path} is not whole: {problems}. Delete {folder} and run the same command again."
    )
