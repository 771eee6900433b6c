"""Reads tensors from weight files that may be damaged or hostile, without ever running code in them.

Files of torch.save pass two checks. The first scans their pickles without loading them: it allows less than torch
does, reports what it found, and rejects files that are small on disk but large in memory, which torch would load. The
second is torch's own restricted unpickler (`weights_only`).
"""

import argparse
import pickle
import pickletools
import re
import struct
import threading
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import IO, Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from virnuc_core.errors import CheckpointError
from virnuc_core.files import parse_object

_NAMESPACE: Final = "argparse.Namespace"

# What torch.load raises for files that are truncated, altered, of another kind, or hold other objects.
_DAMAGE: Final = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError, SafetensorError, zipfile.BadZipFile),
)
# The legacy format of torch.save: a pickled number of 10 bytes, then four more pickles.
_LEGACY: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

# The pickle of the largest published models is a tenth of this.
MAX_PICKLE_BYTES: Final = 1 << 21

_STORAGES: Final = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_TENSORS: Final = frozenset(
    {
        *(f"torch.{name}Storage" for name in _STORAGES),
        *(f"torch._utils.{name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")),
        *("torch.nn.parameter.Parameter", "torch.Size", "collections.OrderedDict", "builtins.set"),
    }
)
_NAMING: Final = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"})
_ADVICE: Final = (
    "Save the tensors alone (torch.save(model.state_dict(), ...) or safetensors) and give that file."
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

    `allowed` are inert stand-ins for named globals; `max_pickle_bytes` limits everything but the tensors.

    Raises:
        CheckpointError: the file is damaged or holds anything but `allowed`, tensors, containers and numbers.
    """
    stand_ins = torch.serialization.safe_globals([(argparse.Namespace, _NAMESPACE), *allowed])
    try:
        with _reading, stand_ins, warnings.catch_warnings():
            require_inert(path, (_NAMESPACE, *(name for _, name in allowed)), max_pickle_bytes)
            warnings.simplefilter("ignore")  # torch's advice on writing the file
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _DAMAGE as error:
        # torch's text before the reason advises loading the file without restrictions.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as a torch file ({type(error).__name__}: {reason}). It may be truncated: "
            "fetch it again, or save it again with a current torch."
        ) from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
    """All tensors of a .safetensors or torch file, memory-mapped, under the names they have there.

    The second result is the model arguments of a fair-esm file, `{"model": ..., "cfg": ...}`; None for others.

    Raises:
        CheckpointError: the file is damaged or holds no state dict.
    """
    if path.suffix == ".safetensors":
        try:
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
            # A name in the header takes some 100 bytes, and the largest models have a thousand names.
            if header_bytes > 1 << 22:
                raise ValueError(f"it declares a header of {header_bytes:,} bytes")
            return load_file(path), None
        except _DAMAGE as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}). It may be truncated: fetch it again."
            ) from error
    content = read_pickle(path)
    arguments = None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        cfg = content.get("cfg")
        namespace = cfg.get("model") if isinstance(cfg, dict) else None
        arguments = vars(namespace) if isinstance(namespace, argparse.Namespace) else None
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
    """Refuses tensors that need far more memory than their file has bytes."""
    # Tensors that share storage are counted each: published files tie at most an embedding to the output layer.
    declared = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if declared > 2 * path.stat().st_size:
        raise CheckpointError(
            f"{path} declares tensors of {declared:,} bytes, which is more than it holds. Fetch it again."
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor is free of NaN and infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # Unlike torch.isfinite, aminmax allocates nothing of the size of the weights.
    return all(isfinite(bound.item()) for bound in tensor.aminmax())


def require_inert(path: Path, allowed: Iterable[str], max_pickle_bytes: int = MAX_PICKLE_BYTES) -> None:
    """Refuses a file whose pickles name anything but tensors, containers and `allowed`, or that expands when read.

    `allowed` are names of inert classes; `max_pickle_bytes` limits everything but the tensors. What a damaged file makes
    zipfile and pickletools raise is passed on.

    Raises:
        CheckpointError: it is not such a file; says what it is instead.
    """
    known = _TENSORS | set(allowed)
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd strings in what may not be a pickle
        begin = file.read(len(_LEGACY))
        file.seek(0)
        if begin.startswith(b"PK\x03\x04"):
            _require_inert_archive(path, known, max_pickle_bytes)
        elif begin == _LEGACY:
            for _ in range(5):
                _require_inert_pickle(path, file, known, max_pickle_bytes)
        elif begin.startswith(b"\x80"):
            raise CheckpointError(
                f"{path} is a plain Python pickle, not a file of torch.save: reading it could run code, so it is not "
                f"loaded. {_ADVICE}"
            )
        else:
            raise ValueError("it does not begin like one")


def _require_inert_archive(path: Path, known: frozenset[str], max_pickle_bytes: int) -> None:
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        pickles = [record for record in records if record.filename.endswith("data.pkl")]
        # torch.save stores every record once, uncompressed.
        unfolds = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        if unfolds or sum(record.file_size for record in records) > path.stat().st_size:
            raise CheckpointError(
                f"{path} is larger in memory than on the disk, which torch.save does not write. {_ADVICE}"
            )
        if len(pickles) != 1:
            raise CheckpointError(f"{path} has {len(pickles)} pickles where a torch file has one. {_ADVICE}")
        with archive.open(pickles[0]) as file:
            _require_inert_pickle(path, file, known, max_pickle_bytes)


def _require_inert_pickle(path: Path, file: IO[bytes], known: frozenset[str], max_pickle_bytes: int) -> None:
    """Scans one pickle and leaves `file` at its end."""
    begin = file.tell()
    tuples: set[object] = set()
    tuple_uses = 0
    before = ""
    for operation, argument, position in pickletools.genops(file):
        if operation.name in _NAMING:
            name = f"object ({operation.name})"
            if operation.name in ("GLOBAL", "INST"):
                name = str(argument).replace(" ", ".").replace("__builtin__.", "builtins.")
            if name not in known:
                raise CheckpointError(
                    f"{path} holds a pickled {name}, which could run code, so it is not loaded. {_ADVICE}"
                )
        if before.startswith("TUPLE") and "PUT" in operation.name:
            tuples.add(argument)
        tuple_uses += "GET" in operation.name and argument in tuples
        # Nested tuples that are each used twice take exponential time to hash; state dicts use none twice.
        if (position or 0) - begin > max_pickle_bytes or tuple_uses > 16:
            raise CheckpointError(
                f"{path} holds a pickle that is too complicated for a state dict. {_ADVICE}"
            )
        before = operation.name
