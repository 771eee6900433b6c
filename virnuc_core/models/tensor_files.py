"""Tensors out of weight files, without ever running code that a file carries."""

import argparse
import json
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from virnuc_core.errors import CheckpointError

# In the order of preference when a folder holds several.
_WHOLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_SHARD_INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# How a file of torch.save without a zip archive begins: with a pickled number of 10 bytes.
_LEGACY_TORCH_FILE: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE: Final = b"\x80"  # and the protocol

# What torch.load raises for files that are truncated, altered, of another kind, or hold other objects.
_DAMAGE: Final = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of a model folder: one whole file, or the shards that an index names.

    Returns:
        The files in a fixed order, safetensors before torch files; empty when there are none.

    Raises:
        CheckpointError: an index is damaged or a shard that it names is missing.
    """
    for whole, index in zip(_WHOLE_FILES, _SHARD_INDEXES, strict=True):
        if (folder / whole).is_file():
            return (folder / whole,)
        if (folder / index).is_file():
            return _indexed_shards(folder / index)
    return ()


def _indexed_shards(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight shards ({error!r}). Fetch it again."
        ) from error
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(
            f"{index.parent} lacks the weight shards {', '.join(missing[:5])} that its index names. "
            "Fetch them into that folder."
        )
    return tuple(index.parent / name for name in names)


def read_pickle(path: Path, allowed: Iterable[tuple[type, str]] = ()) -> Any:
    """Reads a file of torch.save with the restricted unpickler, on the CPU and memory-mapped.

    Args:
        path: the file.
        allowed: inert classes that stand in for the named globals; tensors, containers and numbers are
            always allowed.

    Raises:
        CheckpointError: the file is damaged or holds anything else.
    """
    try:
        _refuse_plain_pickle(path)
        with torch.serialization.safe_globals([(argparse.Namespace, "argparse.Namespace"), *allowed]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _DAMAGE as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds a pickled {foreign[1]}, which could run code, so it is not loaded. Save the "
                "weights alone (torch.save(model.state_dict(), ...) or safetensors) and give that file."
            ) from None
        # torch's own text goes before the reason and advises loading the file without restrictions.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as a torch file ({type(error).__name__}: {reason}). It may be truncated: "
            "fetch it again, or save it again with a current torch."
        ) from error


def _refuse_plain_pickle(path: Path) -> None:
    """Refuses a file of pickle.dump, and says what is in it; nothing of it is run."""
    with path.open("rb") as file:
        begin = file.read(len(_LEGACY_TORCH_FILE))
        if not begin.startswith(_PICKLE) or begin == _LEGACY_TORCH_FILE:
            return
        file.seek(0)
        content = _first_global(file)
    raise CheckpointError(
        f"{path} is a plain Python pickle{f' of {content}' if content else ''}, not a file of torch.save: reading "
        "it could run code, so it is not loaded. Save the weights alone (torch.save(model.state_dict(), ...) or "
        "safetensors) and give that file."
    )


def _first_global(file: IO[bytes]) -> str:
    """Dotted name of the first class or function that a pickle names; "" when it names none."""
    words: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(file):
            if operation.name == "GLOBAL":
                return str(argument).replace(" ", ".")
            if operation.name == "STACK_GLOBAL":
                return ".".join(words[-2:])
            if isinstance(argument, str):
                words.append(argument)
    except (ValueError, EOFError):
        pass  # cut short or altered before it names one
    return ""


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
    """All tensors of one file, memory-mapped, under the names they have there.

    Args:
        path: .safetensors, or a torch file of a state dict or of fair-esm's `{"model": ..., "cfg": ...}`.

    Returns:
        The tensors, and the model arguments of a fair-esm file (None elsewhere).

    Raises:
        CheckpointError: the file is damaged or holds no state dict.
    """
    if path.suffix == ".safetensors":
        try:
            return load_file(path), None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}). It may be truncated: fetch it again."
            ) from error
    content = read_pickle(path)
    arguments = None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        arguments = _fair_esm_arguments(content)
        content = content["model"]
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} holds no state dict. Save model.state_dict() and give that file.")
    if foreign := [str(key) for key, value in content.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{path} holds more than tensors ({', '.join(foreign[:5])}). Save model.state_dict() alone."
        )
    return {str(key): value for key, value in content.items()}, arguments


def _fair_esm_arguments(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arguments of the model in a fair-esm file, where it has them."""
    cfg = content.get("cfg")
    arguments = cfg.get("model") if isinstance(cfg, dict) else None
    return vars(arguments) if isinstance(arguments, argparse.Namespace) else None
