"""Reads tensors from weight files that may be damaged or hostile, without ever running code in them.

Files of torch.save are read by torch's restricted unpickler (`weights_only`), which calls nothing but the functions that make
tensors and containers. What it lets through, files that are small on disk and large in memory, is refused here.
"""

import argparse
import pickle
import re
import struct
import threading
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from virnuc_core.errors import CheckpointError
from virnuc_core.files import parse_object

# What torch.load raises for files that are truncated, altered, of another kind, or hold other objects.
_DAMAGE: Final = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError, SafetensorError, zipfile.BadZipFile),
)
# Torch's list of allowed globals and Python's filters of warnings are those of the whole process.
_reading: Final = threading.Lock()


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of a model folder in a fixed order, safetensors preferred: one file, an index's shards, or none.

    Raises:
        CheckpointError: an index is damaged or a shard that it names is missing.
    """
    for whole in (folder / "model.safetensors", folder / "pytorch_model.bin"):
        if whole.is_file():
            return (whole,)
        if (index := whole.with_name(f"{whole.name}.index.json")).is_file():
            return _indexed_shards(index)
    return ()


def _indexed_shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(parse_object(index.read_bytes())["weight_map"].values()))
        if not names or not all(re.fullmatch(r"[\w-][\w.-]{0,200}", name, re.ASCII) for name in names):
            raise ValueError("it names files outside its folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight shards ({error!r}). Download it again."
        ) from error
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(
            f"{index.parent} lacks the weight shards {', '.join(missing[:5])} named in its index. Download them to that folder."
        )
    return tuple(index.parent / name for name in names)


def read_pickle(path: Path, allowed: Sequence[tuple[type, str]] = ()) -> Any:
    """Reads a file of torch.save with the restricted unpickler, on the CPU and memory-mapped.

    `allowed` are inert stand-ins for named globals.

    Raises:
        CheckpointError: the file is damaged or holds anything but `allowed`, tensors, containers and numbers.
    """
    stand_ins = torch.serialization.safe_globals([(argparse.Namespace, "argparse.Namespace"), *allowed])
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _require_plain_archive(path)
        with _reading, stand_ins, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on writing the file
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except _DAMAGE as error:
        # torch's text around the reason advises loading the file without restrictions, or allowing its objects.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip()
        reason = re.split(r"\n| was not an allowed global", reason, maxsplit=1)[0]
        raise CheckpointError(
            f"{path} cannot be read as a torch file of tensors ({type(error).__name__}: {reason:.200}). If it is truncated, "
            "download it again; if it contains other objects, save only the tensors (torch.save(model.state_dict(), ...) or "
            "safetensors)."
        ) from error


def _require_plain_archive(path: Path) -> None:
    """Refuses archives that torch.save does not write: it stores every record once, uncompressed."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    unfolds = any(record.compress_type != zipfile.ZIP_STORED for record in records)
    if unfolds or sum(record.file_size for record in records) > path.stat().st_size:
        raise ValueError("it is larger in memory than on disk")
    if sum(record.filename.endswith("data.pkl") for record in records) != 1:
        raise ValueError("it does not contain exactly one pickle")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors or torch file, memory-mapped, under the names they have there.

    Raises:
        CheckpointError: the file is damaged or holds no state dict.
    """
    if path.suffix != ".safetensors":
        content = read_pickle(path)
        is_fair_esm = isinstance(content, dict) and isinstance(content.get("model"), dict)
        return state_dict_of(path, content["model"] if is_fair_esm else content)
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        # A name in the header takes some 100 bytes, and the largest models have a thousand names.
        if header_bytes > 1 << 22:
            raise ValueError(f"it declares a header of {header_bytes:,} bytes")
        return load_file(path)
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}). It may be truncated: download it again."
        ) from error


def state_dict_of(path: Path, content: Any) -> dict[str, Tensor]:
    """What a torch file holds, as tensors by name; raises CheckpointError if it is anything else."""
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} contains no state dict. Save model.state_dict() and give that file.")
    if foreign := [str(key) for key, value in content.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{path} contains more than tensors ({', '.join(foreign[:5])}). Save only model.state_dict()."
        )
    require_backed(path, content.values())
    return {str(key): value for key, value in content.items()}


def require_backed(path: Path, tensors: Iterable[Tensor]) -> None:
    """Refuses tensors whose numbers are not all in the file, or that need far more memory than it has bytes."""
    declared = 0
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(
                f"{path} contains sparse, quantized or empty tensors. Save dense ones and give that file."
            )
        # Tensors that share storage are counted each: published files tie at most an embedding to the output layer.
        declared += tensor.numel() * tensor.element_size()
    if declared > 2 * path.stat().st_size:
        raise CheckpointError(
            f"{path} declares tensors of {declared:,} bytes, more than it contains. Download it again."
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor is free of NaN and infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # Unlike torch.isfinite, aminmax allocates nothing of the size of the weights.
    return all(isfinite(bound.item()) for bound in tensor.aminmax())
