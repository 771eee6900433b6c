"""Models by name: fetched from the model hub, opened, and copied for machines without a network."""

import logging
import os
import shutil
from fnmatch import filter as filter_names
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import file_digest, write_text
from virnuc_core.models.catalogue import (
    BUNDLED_TOKENIZER,
    RANDOM,
    CatalogueEntry,
    find_entries,
    known_names,
    require_known_model,
    split_family,
)
from virnuc_core.models.checkpoint import Checkpoint
from virnuc_core.models.tensor_files import find_weight_files
from virnuc_core.specs import Family

SUMS_NAME: Final = "SHA256SUMS"
_DESCRIPTIONS: Final = ("config.json", "tokenizer.json")

logger = logging.getLogger(__name__)


def family_of(model: str) -> tuple[Family, str]:
    """Family and name of `esm2:NAME|PATH`, `dnabert:NAME|PATH`, or a bare name or path."""
    family, name = split_family(model)
    return family or open_checkpoint(name, None).family, name


def open_checkpoint(name_or_path: str, family: Family | None) -> Checkpoint:
    """Opens a model by catalogue name, else existing path, else `owner/name` on the hub, fetching it if needed.

    `random:` before a catalogue name draws the weights at random; without `family`, the content tells it.

    Raises:
        UsageError: without a family, the name is that of two models.
        CheckpointError: the model does not exist, cannot be fetched, is damaged, or is of the other family.
    """
    entry = _entry_of(name_or_path.removeprefix(RANDOM), family, name_or_path)
    if name_or_path.startswith(RANDOM):
        if entry is None:
            raise CheckpointError(
                f"{name_or_path} is not a model with random weights: give {RANDOM} and one of "
                f"{known_names(family)}."
            )
        name = f"{RANDOM}{entry.name}"
        # The bundled vocabulary has the size of all DNA models.
        tokenizer = BUNDLED_TOKENIZER if entry.spec.family == "dnabert_s" else None
        return Checkpoint(
            name=name,
            family=entry.spec.family,
            location=Path(name),
            tokenizer_file=tokenizer,
            random_spec=entry.spec,
        )
    # Not resolved: the files of the hub's cache are links to files without a suffix.
    path = Path(os.path.expanduser(name_or_path)).absolute()
    if entry is None and os.path.exists(path):
        return Checkpoint.open(path, family)
    folder, _ = _locate(name_or_path, family, entry)
    return Checkpoint.open(folder, family, name=entry.name if entry else name_or_path)


def _entry_of(name: str, family: Family | None, asked: str) -> CatalogueEntry | None:
    entries = find_entries(name, family)
    if len(entries) > 1:
        raise UsageError(
            f"{asked} names both an ESM-2 and a DNABERT-S model: give esm2:{asked} or dnabert:{asked}."
        )
    return entries[0] if entries else None


def _locate(name: str, family: Family | None, entry: CatalogueEntry | None) -> tuple[Path, str | None]:
    """Folder and commit of a model of the catalogue, or of the hub's repository `name`; bundled ones have no commit."""
    require_known_model(name, family)
    if entry and entry.bundled:
        return entry.bundled, None
    folder = fetch(entry.repo, entry.revision) if entry else fetch(name, None)
    return folder, folder.name  # the hub's cache names a snapshot by its commit


def fetch(repo: str, revision: str | None) -> Path:
    """The folder of a repository in the hub's local cache, named by its commit; downloaded if it is not there.

    A pinned `revision` (40-digit commit) in the cache is used without contacting the hub. None is the newest one, or
    the newest in the cache if the hub is unreachable.

    Raises:
        CheckpointError: the hub is unreachable or the repository has no weights; says how to fetch it elsewhere.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if revision is not None and (folder := find_cached(repo, revision)):
        return folder
    # The hub's own error is derived from that of its HTTP client, which a failing connection raises.
    failures = cast(tuple[type[Exception], ...], (OSError, ValueError, *HfHubHTTPError.__bases__))
    try:
        # Unlike downloads, this request is not retried, so a machine without a network fails at once.
        info = HfApi().model_info(repo, revision=revision, timeout=20)
        names = [file.rfilename for file in info.siblings or ()]
        weights = filter_names(names, "model*.safetensors*") or filter_names(names, "pytorch_model*.bin*")
        if not weights:
            raise CheckpointError(
                f"{repo} on the model hub has no model*.safetensors or pytorch_model*.bin. Give another one."
            )
        logger.info("downloading %s at %s from the model hub", repo, info.sha)
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*_DESCRIPTIONS, *weights]))
    except failures as error:
        if revision is None and (folder := find_cached(repo, None)):
            logger.warning("cannot reach the model hub; using %s from its cache, %s", repo, folder)
            return folder
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        at = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"{repo} cannot be downloaded from the model hub ({reason}).\nOn a machine that can reach it, run\n"
            f"    hf download {repo}{at} --local-dir DIR\nthen give DIR as the model."
        ) from error


def find_cached(repo: str, revision: str | None) -> Path | None:
    """The folder of a repository in the hub's cache; None unless complete. Does not contact the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Without patterns, a snapshot that was fetched in part on purpose would count as incomplete.
    patterns = list(_DESCRIPTIONS)
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True)
        return Path(folder) if find_weight_files(Path(folder)) else None
    except (LocalEntryNotFoundError, CheckpointError):
        return None


def pull(name: str, to: Path | None) -> tuple[Checkpoint, str | None, Path | None]:
    """Fetches a model by name, with or without family prefix, unless it is here; checks it, and copies it below `to`.

    The hashes of fetched files are checked, and the shapes of all tensors. Returns the model, its commit and its copy.

    Raises:
        UsageError: the name is that of two models or of a path, or the copy cannot be made there.
        CheckpointError: there is no such model, it cannot be fetched, or what was fetched is damaged.
    """
    family, short = split_family(name)
    entry = _entry_of(short, family, name)
    if entry is None and os.path.exists(os.path.expanduser(short)):
        raise UsageError(f"{name} is a local path, with nothing to download: check it with virnuc inspect.")
    folder, revision = _locate(short, family, entry)
    if revision:
        _require_undamaged(name, folder)
    checkpoint = Checkpoint.open(folder, family, name=name)
    checkpoint.published_parts()
    if to is None:
        return checkpoint, revision, None
    copy = to / (short.rpartition("/")[2] if revision else folder.name)
    _copy(checkpoint, copy)
    return checkpoint, revision, copy


def _require_undamaged(name: str, folder: Path) -> None:
    """Compares files with their names in the hub's cache: SHA-256 for large ones, Git's SHA-1 for small ones."""
    from huggingface_hub.utils.sha import git_hash

    for path in folder.iterdir():
        blob = path.resolve()
        found = file_digest(blob) if len(blob.name) == 64 else git_hash(blob.read_bytes())
        if found != blob.name:
            raise CheckpointError(
                f"{name} is damaged: {path} does not match its hash on the model hub. Delete {folder.parents[1]} and run the "
                "same command again."
            )


def _copy(checkpoint: Checkpoint, folder: Path) -> None:
    """Copies a model's files with a list of their hashes; the same model there is left alone."""
    if os.path.lexists(folder):
        if not folder.is_dir() or Checkpoint.open(folder).fingerprint != checkpoint.fingerprint:
            raise UsageError(f"{folder} exists and is not this model: delete it, or give another --to.")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()  # a scratch folder is for its owner alone
        for path in (*checkpoint.files, *checkpoint.location.glob("*.json")):
            shutil.copyfile(path, made / path.name)
        write_sums(made)
        made.replace(folder)


def write_sums(folder: Path) -> None:
    """Writes the SHA256SUMS of the files in a folder, for `sha256sum --check`."""
    lines = sorted((path.name, file_digest(path)) for path in folder.iterdir() if path.name != SUMS_NAME)
    write_text(folder / SUMS_NAME, "".join(f"{digest}  {name}\n" for name, digest in lines))
