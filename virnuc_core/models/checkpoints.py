"""From what the user typed to the files of a model: a catalogue name, a hub name, a file or a folder.

`random:NAME` is a catalogue model with weights drawn at random, for benchmarks: it has no files.
"""

import os
from dataclasses import replace
from pathlib import Path

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.models.catalogue import (
    CATALOGUE,
    RANDOM,
    CatalogueEntry,
    find_entries,
    known_names,
    require_known_model,
    split_family,
)
from virnuc_core.models.hub import fetch, find_cached
from virnuc_core.models.random_weights import published_spec
from virnuc_core.models.tensor_files import find_weight_files
from virnuc_core.models.weights import Checkpoint, read_spec, recognise_family
from virnuc_core.specs import MODEL_IN_WORDS, Family


def family_of(model: str) -> tuple[Family, str]:
    """Family and name that `esm2:NAME|PATH`, `dnabert:NAME|PATH` or a name or path alone stand for.

    Raises:
        CheckpointError: it has no prefix and cannot be recognised by its content.
    """
    family, name = split_family(model)
    return family or resolve_checkpoint(name, None).family, name


def resolve_checkpoint(name_or_path: str, family: Family | None) -> Checkpoint:
    """Finds the files of a model, fetching them from the model hub where that is what the name means.

    A catalogue name comes first, then a path that exists, then `owner/name` on the hub.

    Args:
        name_or_path: catalogue name, hub name, weight file, folder of a model, or `random:` and a catalogue
            name.
        family: the architecture it must have; None recognises it by its content.

    Raises:
        UsageError: without a family, the name is that of two models.
        CheckpointError: there is no such model, it cannot be fetched, a file is missing or damaged, or it
            is of the other family.
    """
    is_random = name_or_path.startswith(RANDOM)
    if entries := find_entries(name_or_path.removeprefix(RANDOM), family):
        if len(entries) > 1:
            raise UsageError(
                f"{name_or_path} is the name of an ESM-2 and of a DNABERT-S model: give esm2:{name_or_path} or "
                f"dnabert:{name_or_path}."
            )
        return _with_random_weights(entries[0]) if is_random else _from_catalogue(entries[0])
    if is_random:
        raise CheckpointError(
            f"{name_or_path} is not a model with random weights: give {RANDOM} and one of "
            f"{', '.join(known_names(family))}."
        )
    # Not resolved: the files of the hub's cache are links to files without a suffix.
    path = Path(os.path.expanduser(name_or_path)).absolute()
    if os.path.exists(path):
        return _from_path(path.name, path, family)
    require_known_model(name_or_path, family)
    folder = fetch(name_or_path, None)
    found = _from_path(name_or_path, folder, family)
    # The hub's cache names a snapshot by its commit.
    return replace(found, revision=folder.name)


def location_of(entry: CatalogueEntry) -> Path | None:
    """The folder of a catalogue model in this package or in the hub's cache; None when it is not on this machine."""
    if isinstance(entry.source, Path):
        return entry.source
    return find_cached(entry.source.repo, entry.source.revision)


def _from_catalogue(entry: CatalogueEntry) -> Checkpoint:
    if isinstance(entry.source, Path):
        return _from_path(entry.name, entry.source, entry.family)
    folder = fetch(entry.source.repo, entry.source.revision)
    return replace(_from_path(entry.name, folder, entry.family), revision=entry.source.revision)


def _with_random_weights(entry: CatalogueEntry) -> Checkpoint:
    """The architecture of a catalogue model; DNA models get the bundled vocabulary, which has their size."""
    bundled = {known.family: known for known in CATALOGUE if isinstance(known.source, Path)}
    tiny = _from_catalogue(bundled[entry.family])
    return Checkpoint(
        name=f"{RANDOM}{entry.name}",
        family=entry.family,
        location=Path(f"{RANDOM}{entry.name}"),
        files=(),
        tokenizer=tiny.tokenizer,
        random_spec=read_spec(tiny) if entry.name == tiny.name else published_spec(entry),
    )


def _from_path(name: str, path: Path, family: Family | None) -> Checkpoint:
    folder = path if path.is_dir() else path.parent
    files = find_weight_files(path) if path.is_dir() else (path,)
    if not files:
        raise CheckpointError(
            f"{path} holds no model.safetensors or pytorch_model.bin, whole or in shards. "
            "Give the folder that holds the weights, or the weight file itself."
        )
    found = recognise_family(files)
    if family is not None and family != found:
        raise CheckpointError(
            f"{path} holds {MODEL_IN_WORDS[found]} where {MODEL_IN_WORDS[family]} is needed. "
            f"Give the checkpoint of {MODEL_IN_WORDS[family]}."
        )
    beside = {kind: folder / f"{kind}.json" for kind in ("config", "tokenizer")}
    return Checkpoint(
        name=name,
        family=found,
        location=path,
        files=files,
        config=beside["config"] if beside["config"].is_file() else None,
        tokenizer=beside["tokenizer"] if found == "dnabert_s" and beside["tokenizer"].is_file() else None,
    )
