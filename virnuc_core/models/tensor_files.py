"""Tensors out of weight files, without ever running code that a file carries."""

import argparse
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from virnuc_core.errors import CheckpointError
from virnuc_core.files import parse_object
from virnuc_core.models.pickle_check import MAX_PICKLE_BYTES, require_inert

_FILE_NAME: Final = re.compile(r"[\w-][\w.-]{0,200}", re.ASCII)

# In the order of preference when a folder holds several.
_WHOLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_SHARD_INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_NAMESPACE: Final = "argparse.Namespace"

# What torch.load raises for files that are truncated, altered, of another kind, or hold other objects.
_DAMAGE: Final = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError, SafetensorError),
)
# A name in the header takes some 100 bytes, and the largest models have a thousand names.
_MOST_HEADER_BYTES: Final = 1 << 22
# Tensors that share their storage count each: published files tie an embedding to the output layer at most.
_MOST_BYTES_A_BYTE: Final = 2


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
        names = sorted(set(parse_object(index.read_bytes())["weight_map"].values()))
        if not names or not all(_FILE_NAME.fullmatch(name) for name in names):
            raise ValueError("it names other things than files beside it")
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


def read_pickle(
    path: Path, allowed: Sequence[tuple[type, str]] = (), max_pickle_bytes: int = MAX_PICKLE_BYTES
) -> Any:
    """Reads a file of torch.save with the restricted unpickler, on the CPU and memory-mapped.

    Args:
        path: the file.
        allowed: inert classes that stand in for the named globals; tensors, containers and numbers are
            always allowed.
        max_pickle_bytes: most bytes beside the tensors.

    Raises:
        CheckpointError: the file is damaged or holds anything else.
    """
    try:
        require_inert(path, (_NAMESPACE, *(name for _, name in allowed)), max_pickle_bytes)
        stand_ins = torch.serialization.safe_globals([(argparse.Namespace, _NAMESPACE), *allowed])
        with stand_ins, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on how the file should have been written
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _DAMAGE as error:
        # torch's own text goes before the reason and advises loading the file without restrictions.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as a torch file ({type(error).__name__}: {reason}). It may be truncated: "
            "fetch it again, or save it again with a current torch."
        ) from error


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
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _MOST_HEADER_BYTES:
                raise ValueError(f"it declares a header of {header_bytes:,} bytes")
            return load_file(path), None
        except _DAMAGE as error:
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
    tensors = {str(key): value for key, value in content.items()}
    require_backed(path, tensors.values())
    return tensors, arguments


def require_backed(path: Path, tensors: Iterable[Tensor]) -> None:
    """Refuses tensors that would need far more memory than their file has bytes.

    Raises:
        CheckpointError: they do, by sharing values among them or by repeating them.
    """
    declared = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if declared > _MOST_BYTES_A_BYTE * path.stat().st_size:
        raise CheckpointError(
            f"{path} declares tensors of {declared:,} bytes, which is more than it holds. Fetch it again."
        )


def _fair_esm_arguments(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arguments of the model in a fair-esm file, where it has them."""
    cfg = content.get("cfg")
    arguments = cfg.get("model") if isinstance(cfg, dict) else None
    return vars(arguments) if isinstance(arguments, argparse.Namespace) else None


def is_finite(tensor: Tensor) -> bool:
    """Whether no number of a tensor is NaN or infinite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # Unlike isfinite, it needs no memory of the size of the weights.
    return all(isfinite(bound.item()) for bound in tensor.aminmax())
