"""Models by name: fetched from the model hub, opened, verified and copied."""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from virnuc_core.errors import CheckpointError, DamagedFileError, UsageError
from virnuc_core.files import file_digest, sync_file, sync_folder, write_text
from virnuc_core.models.catalogue import (
    BUNDLED_HEADS,
    BUNDLED_TOKENIZER,
    RANDOM,
    CatalogueEntry,
    HubCommit,
    find_entries,
    known_names,
    require_known_model,
    split_family,
)
from virnuc_core.models.checkpoint import Checkpoint
from virnuc_core.models.digests import new_digest
from virnuc_core.models.heads import Head, describe_inputs, load_head
from virnuc_core.models.tensor_files import find_weight_files, is_finite
from virnuc_core.specs import Family

_DESCRIPTIONS: Final = ("config.json", "tokenizer.json")
_ANSWER_WITHIN_S: Final = 20

# A list of hashes beside files, in the format of sha256sum.
SUMS_NAME: Final = "SHA256SUMS"
_SUMS_LINE: Final = re.compile(r"([0-9a-f]{64})[ ][ *]([\w-][\w.-]{0,200})", re.ASCII)
_MAX_SUMS_BYTES: Final = 1 << 20
# The hub's cache names files by their hash: SHA-256 for large ones, Git's SHA-1 for small ones.
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1: Final = re.compile(r"[0-9a-f]{40}")

logger = logging.getLogger(__name__)


def family_of(model: str) -> tuple[Family, str]:
    """Family and name of `esm2:NAME|PATH`, `dnabert:NAME|PATH`, or a bare name or path.

    Raises:
        CheckpointError: there is no prefix, and the content is not recognised.
    """
    family, name = split_family(model)
    return family or open_checkpoint(name, None).family, name


def open_checkpoint(name_or_path: str, family: Family | None) -> Checkpoint:
    """Opens a model by catalogue name, else existing path, else `owner/name` on the hub, fetching it if needed.

    `random:` before a catalogue name draws the weights at random; without `family`, the content tells it.

    Raises:
        UsageError: without a family, the name is that of two models.
        CheckpointError: the model does not exist, cannot be fetched, is damaged, or is of the other family.
    """
    is_random = name_or_path.startswith(RANDOM)
    if entries := find_entries(name_or_path.removeprefix(RANDOM), family):
        if len(entries) > 1:
            raise UsageError(
                f"{name_or_path} is the name of an ESM-2 and of a DNABERT-S model: give esm2:{name_or_path} or "
                f"dnabert:{name_or_path}."
            )
        [entry] = entries
        if is_random:
            return _with_random_weights(entry)
        if isinstance(entry.source, Path):
            return Checkpoint.open(entry.source, entry.family, name=entry.name)
        folder = fetch(entry.source.repo, entry.source.revision)
        return Checkpoint.open(folder, entry.family, name=entry.name, revision=entry.source.revision)
    if is_random:
        raise CheckpointError(
            f"{name_or_path} is not a model with random weights: give {RANDOM} and one of "
            f"{', '.join(known_names(family))}."
        )
    # Not resolved: the files of the hub's cache are links to files without a suffix.
    path = Path(os.path.expanduser(name_or_path)).absolute()
    if os.path.exists(path):
        return Checkpoint.open(path, family)
    require_known_model(name_or_path, family)
    folder = fetch(name_or_path, None)
    # The hub's cache names a snapshot by its commit.
    return Checkpoint.open(folder, family, name=name_or_path, revision=folder.name)


def _with_random_weights(entry: CatalogueEntry) -> Checkpoint:
    """The architecture of a catalogue model; DNA models get the bundled vocabulary, which has their size."""
    return Checkpoint(
        name=f"{RANDOM}{entry.name}",
        family=entry.family,
        location=Path(f"{RANDOM}{entry.name}"),
        tokenizer_file=BUNDLED_TOKENIZER if entry.family == "dnabert_s" else None,
        random_spec=entry.spec,
    )


def open_weights(path: Path) -> Checkpoint | Head:
    """Opens a model's folder or file, or a head, recognised by content; no code in a file is run.

    Raises:
        CheckpointError: there is nothing there, or it is neither.
    """
    if os.path.isdir(path):
        return Checkpoint.open(path.absolute())
    if not os.path.isfile(path):
        raise CheckpointError(f"there is no file or folder {path}: give the path of a model or of a head.")
    try:
        return load_head(path)
    except CheckpointError as head_error:
        try:
            return Checkpoint.open(path.absolute())
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is neither a head nor a model. As a head: {head_error} As a model: {error}"
            ) from error


# The hub and its cache.


def fetch(repo: str, revision: str | None) -> Path:
    """The folder of a repository in the hub's local cache, named by its commit; downloaded if it is not there.

    A pinned `revision` (40-digit commit) in the cache is used without contacting the hub. None is the newest one, or
    the newest in the cache if the hub is unreachable.

    Raises:
        CheckpointError: the hub is unreachable or the repository has no weights; says how to fetch it elsewhere.
    """
    from huggingface_hub.errors import HfHubHTTPError

    if revision is not None and (folder := find_cached(repo, revision)):
        return folder
    # What a failing request raises: the hub's own error is derived from that of its HTTP client.
    client_errors = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
    failures: tuple[type[Exception], ...] = (OSError, ValueError, *client_errors)
    try:
        return _download(repo, revision)
    except failures as error:
        if revision is None and (folder := find_cached(repo, None)):
            logger.warning("the model hub cannot be reached; %s is taken from its cache, %s", repo, folder)
            return folder
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        at = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"{repo} cannot be fetched from the model hub ({reason}).\nOn a machine that reaches it, run\n"
            f"    hf download {repo}{at} --local-dir DIR\nthen give DIR as the model."
        ) from error


def hide_progress() -> None:
    """Disables the progress bars of the hub's client."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()


def cache_folder() -> Path:
    """The cache folder of the hub's client."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def location_of(entry: CatalogueEntry) -> Path | None:
    """The folder of a catalogue model in this package or in the hub's cache; None if it is not on this machine."""
    if isinstance(entry.source, Path):
        return entry.source
    return find_cached(entry.source.repo, entry.source.revision)


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


def _download(repo: str, revision: str | None) -> Path:
    """Downloads the configuration, the tokenizer and one form of the weights, preferably safetensors."""
    from huggingface_hub import HfApi, snapshot_download

    # Unlike downloads, this request is not retried, so a machine without a network fails at once.
    info = HfApi().model_info(repo, revision=revision, timeout=_ANSWER_WITHIN_S)
    names = [file.rfilename for file in info.siblings or ()]
    weights = [name for name in names if name.startswith("model") and ".safetensors" in name]
    weights = weights or [name for name in names if name.startswith("pytorch_model") and ".bin" in name]
    if not weights:
        raise CheckpointError(
            f"{repo} on the model hub holds no model*.safetensors or pytorch_model*.bin. Give another one."
        )
    logger.info("fetching %s at %s from the model hub", repo, info.sha)
    return Path(snapshot_download(repo, revision=revision, allow_patterns=[*_DESCRIPTIONS, *weights]))


# Hashes.


def write_sums(folder: Path, files: Iterable[Path]) -> None:
    """Writes the `SHA256SUMS` of files in a folder."""
    lines = sorted((path.name, file_digest(path)) for path in files)
    write_text(folder / SUMS_NAME, "".join(f"{digest}  {name}\n" for name, digest in lines))


def read_sums(path: Path) -> dict[str, str]:
    """SHA-256 by file name.

    Raises:
        DamagedFileError: the file is not such a list.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_SUMS_BYTES).decode().splitlines()
    except UnicodeDecodeError:
        lines = [""]
    found = [_SUMS_LINE.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in found if match}
    if not all(found) or len(sums) < len(lines):
        raise DamagedFileError(
            f"{path} is not a list of SHA-256 and file names, as sha256sum writes it: fetch it again, or delete it to "
            "do without hashes."
        )
    return sums


def check_hash(path: Path, sha256: str) -> tuple[str, str]:
    """Compares the SHA-256 of a file with the `SHA256SUMS` beside it, or with its name in the hub's cache.

    Returns:
        Where the expected hash is from, and what is wrong; either may be empty.

    Raises:
        DamagedFileError: the list cannot be read.
    """
    sums = path.parent / SUMS_NAME
    if sums.is_file():
        expected = read_sums(sums).get(path.name)
        if expected is None:
            return "", f"{path} is not in {sums}"
        same = sha256 == expected
        return str(sums), "" if same else f"{path} is not what it was: its SHA-256 is not that in {sums}"
    blob = path.resolve()
    if not path.is_symlink() or blob.parent.name != "blobs":
        return "", ""
    if _SHA256.fullmatch(blob.name):
        same = sha256 == blob.name
    elif _GIT_SHA1.fullmatch(blob.name):
        content = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
        with blob.open("rb") as file:
            while piece := file.read(1 << 20):
                content.update(piece)
        same = content.hexdigest() == blob.name
    else:
        return "", ""
    return "the model hub", "" if same else f"{path} is damaged: its content is not what the model hub says"


# Verifying.


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What `verify` found of one model or head; what is unknown is None or empty.

    `fingerprint` is the SHA-256 (hex) that identifies it in plans and runs; `hashes_from` names the list of expected
    hashes.
    """

    name: str
    location: Path | None
    weights: Checkpoint | Head | None = field(default=None, repr=False)
    fingerprint: str = ""
    facts: str = ""
    hashes_from: str = ""
    problems: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it is intact."""
        return not self.problems

    @property
    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "name": self.name,
            "location": str(self.location) if self.location else None,
            "whole": self.is_whole,
            "facts": self.facts,
            "fingerprint": self.fingerprint or None,
            "hashes_from": self.hashes_from or None,
            "problems": list(self.problems),
        }

    @property
    def summary(self) -> str:
        """For the terminal."""
        lines = [f"{self.name}: {'whole' if self.is_whole else 'not whole'}"]
        lines += [f"  {self.facts}"] if self.facts else []
        lines += [f"  in {self.location}"] if self.location else []
        if self.fingerprint:
            known = (
                f"hashes as in {self.hashes_from}" if self.hashes_from else "no hashes are known of its files"
            )
            lines += [f"  fingerprint {self.fingerprint}, {known}"]
        return "\n".join([*lines, *(f"  problem: {problem}" for problem in self.problems)])


def verify(name_or_path: str) -> Verification:
    """Checks hashes, structure and numbers of a model or head on this machine, by name or path; fetches nothing.

    Of the index beside a head, the hash is checked; whoever loads it checks the rest.
    """
    location: Path | None = None
    try:
        location, entry = _find_here(name_or_path)
        return _verified(name_or_path, location, entry)
    except (CheckpointError, DamagedFileError) as error:
        return Verification(name=name_or_path, location=location, problems=(str(error),))


def verify_all(name_or_path: str) -> list[Verification]:
    """As `verify`; a name that bundled models share with their head is for all of them."""
    entries = find_entries(name_or_path, None) if name_or_path in BUNDLED_HEADS else []
    return [verify(name) for name in (*(entry.qualified_name for entry in entries), name_or_path)]


def _find_here(name_or_path: str) -> tuple[Path, CatalogueEntry | None]:
    if name_or_path in BUNDLED_HEADS:
        return BUNDLED_HEADS[name_or_path], None
    family, name = split_family(name_or_path)
    entries = find_entries(name, family)
    if len(entries) > 1:
        raise CheckpointError(
            f"{name} is the name of an ESM-2 and of a DNABERT-S model: give esm2:{name} or dnabert:{name}."
        )
    if not entries:
        return Path(name).expanduser(), None
    [entry] = entries
    location = location_of(entry)
    if location is None:
        raise CheckpointError(f"{name} is not on this machine: virnuc models pull {name} fetches it.")
    return location, entry


def _verified(name: str, location: Path, entry: CatalogueEntry | None) -> Verification:
    weights = open_weights(location) if entry is None else Checkpoint.open(location, entry.family)
    problems = []
    if not isinstance(weights, Checkpoint):
        digests = {location: new_digest(location)}
        fingerprint = digests[location]
        facts = f"head for {describe_inputs(weights)}"
    else:
        spec = weights.spec
        tokenizer = weights.tokenizer_path if spec.family == "dnabert_s" else None
        digests = {path: new_digest(path) for path in (*weights.files, weights.config, tokenizer) if path}
        fingerprint = weights.fingerprint_from(digests.__getitem__)
        facts = f"{spec.family}, {spec.num_layers} layers, width {spec.embedding_dim}, {spec.num_heads} heads"
        for attribute, words in (
            ("num_layers", "layers"),
            ("embedding_dim", "width"),
            ("num_heads", "heads"),
        ):
            found = getattr(spec, attribute)
            if entry is not None and found != (wanted := getattr(entry.spec, attribute)):
                problems.append(f"it has {found} {words} where {entry.name} has {wanted}")
        state = weights.state_dict()
        problems += [
            f"{key} holds numbers that are not finite" for key, value in state.items() if not is_finite(value)
        ]
    checks = [check_hash(path, digest) for path, digest in digests.items()]
    return Verification(
        name=name,
        location=location,
        weights=weights,
        fingerprint=fingerprint,
        facts=facts,
        hashes_from=", ".join(sorted({known_from for known_from, _ in checks if known_from})),
        problems=(*(problem for _, problem in checks if problem), *problems),
    )


# Pulling: fetching in advance, for machines that cannot reach the hub.


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """One model that is now on this machine; a bundled one has no `revision`. `fingerprint` is SHA-256 (hex)."""

    name: str
    family: Family
    location: Path
    revision: str | None
    fingerprint: str
    hashes_from: str
    copy: Path | None = None

    @property
    def path(self) -> Path:
        """What to pass as the model: the copy if there is one."""
        return self.copy or self.location


def pull(name: str, to: Path | None) -> Pulled:
    """Fetches a model by name, with or without family prefix, unless it is here; verifies it, and copies it below `to`.

    Raises:
        UsageError: the name is that of two models or a path, or the copy cannot be made there.
        CheckpointError: there is no such model, it cannot be fetched, or what was fetched is damaged.
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
        revision: str | None = location.name
    else:
        location, revision = source, None
    found, checkpoint = _require_whole(entries[0].qualified_name if entries else str(location))
    if family not in (None, checkpoint.family):
        Checkpoint.open(location, family)  # which says what it is instead
    copy = None
    if to is not None:
        copy = to / (short.rpartition("/")[2] if revision else location.name)
        _copy(found, checkpoint, copy)
    return Pulled(
        name=name,
        family=checkpoint.family,
        location=location,
        revision=revision,
        fingerprint=found.fingerprint,
        hashes_from=found.hashes_from,
        copy=copy,
    )


def _copy(found: Verification, checkpoint: Checkpoint, folder: Path) -> None:
    """Copies a model as plain files with a list of their hashes; an existing intact copy is left alone."""
    if os.path.lexists(folder):
        there = verify(str(folder))
        if not there.is_whole or there.fingerprint != found.fingerprint:
            raise UsageError(
                f"{folder} is in the way and is not this model, whole: delete it, or give another --to."
            )
        return
    files = [path for path in (*checkpoint.files, checkpoint.config, checkpoint.tokenizer_file) if path]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as made:
        for path in (*files, *checkpoint.location.glob("*.index.json")):
            shutil.copyfile(path, made / path.name)
    _require_whole(str(folder))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder that gets its name once it is complete, with a list of the hashes of its files."""
    with TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        yield made
        write_sums(made, list(made.iterdir()))
        for path in made.iterdir():
            sync_file(path)
        os.replace(made, folder)
    sync_folder(folder.absolute().parent)


def _require_whole(name_or_path: str) -> tuple[Verification, Checkpoint]:
    found = verify(name_or_path)
    if found.is_whole and isinstance(found.weights, Checkpoint):
        return found, found.weights
    folder = found.location
    if folder is not None and folder.parent.name == "snapshots":  # of the hub's cache, whose files are links
        folder = folder.parents[1]
    problems = "; ".join(problem.rstrip(".") for problem in found.problems)
    raise CheckpointError(
        f"{name_or_path} is not whole: {problems}. Delete {folder} and run the same command again."
    )
