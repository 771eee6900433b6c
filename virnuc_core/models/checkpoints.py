"""From what the user typed to the files of a model: a catalogue name, a hub name, a file or a folder."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.models.catalogue import CatalogueEntry, find_entries, known_names
from virnuc_core.models.hub import fetch
from virnuc_core.models.tensor_files import find_weight_files
from virnuc_core.models.weights import Checkpoint, recognise_family
from virnuc_core.specs import MODEL_IN_WORDS, Family

_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def resolve_checkpoint(name_or_path: str, family: Family | None) -> Checkpoint:
    """Finds the files of a model, fetching them from the model hub where that is what the name means.

    A catalogue name comes first, then a path that exists, then `owner/name` on the hub.

    Args:
        name_or_path: catalogue name, hub name, weight file, or folder of a model.
        family: the architecture it must have; None recognises it by its content.

    Raises:
        UsageError: without a family, the name is that of two models.
        CheckpointError: there is no such model, it cannot be fetched, a file is missing or damaged, or it
            is of the other family.
    """
    if entries := find_entries(name_or_path, family):
        if len(entries) > 1:
            raise UsageError(
                f"{name_or_path} is the name of an ESM-2 and of a DNABERT-S model: give esm2:{name_or_path} or "
                f"dnabert:{name_or_path}."
            )
        return _from_catalogue(entries[0])
    # Not resolved: the files of the hub's cache are links to files without a suffix.
    path = Path(name_or_path).expanduser().absolute()
    if path.exists():
        return _from_path(path.name, path, family)
    if _HUB_NAME.fullmatch(name_or_path):
        folder = fetch(name_or_path, None)
        found = _from_path(name_or_path, folder, family)
        # The hub's cache names a snapshot by its commit.
        return replace(found, revision=folder.name)
    raise CheckpointError(
        f"there is no model {name_or_path}: it is not a file or folder, not OWNER/NAME on the model hub, "
        f"and not one of {', '.join(known_names(family))}."
    )


def _from_catalogue(entry: CatalogueEntry) -> Checkpoint:
    if isinstance(entry.source, Path):
        return _from_path(entry.name, entry.source, entry.family)
    folder = fetch(entry.source.repo, entry.source.revision)
    return replace(_from_path(entry.name, folder, entry.family), revision=entry.source.revision)


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
