"""What a file of torch.save holds, found out without loading it.

torch's own restricted unpickler is the second wall: this one is narrower, names what it finds, and keeps files out that
are small on the disk and large in memory.
"""

import pickletools
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final

from virnuc_core.errors import CheckpointError

_ARCHIVE: Final = b"PK\x03\x04"
# A file of torch.save without a zip archive begins with a pickled number of 10 bytes and goes on with four pickles.
_LEGACY: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_PICKLES: Final = 5
_PICKLE: Final = b"\x80"  # and the protocol

# The pickle of the largest published models is a tenth of this.
MAX_PICKLE_BYTES: Final = 1 << 21
# A tuple of tuples, each of them used twice, takes for ever to hash; state dicts use none twice.
_MOST_TUPLE_USES: Final = 16

_STORAGES: Final = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_TENSORS: Final = frozenset(
    {
        *(f"torch.{name}Storage" for name in _STORAGES),
        *(f"torch._utils.{name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")),
        *("torch.nn.parameter.Parameter", "torch.Size", "collections.OrderedDict", "builtins.set"),
    }
)


def require_inert(path: Path, allowed: Iterable[str], max_pickle_bytes: int = MAX_PICKLE_BYTES) -> None:
    """Refuses a file whose pickles name anything but tensors and containers, or that unfolds when it is read.

    Args:
        path: the file.
        allowed: further names, of inert classes.
        max_pickle_bytes: most bytes beside the tensors.

    Raises:
        CheckpointError: it is not such a file; says what it is instead.
    """
    known = _TENSORS | set(allowed)
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd strings in what may be no pickle at all
        begin = file.read(len(_LEGACY))
        file.seek(0)
        if begin.startswith(_ARCHIVE):
            _require_inert_archive(path, known, max_pickle_bytes)
        elif begin == _LEGACY:
            for _ in range(_LEGACY_PICKLES):
                _require_inert_pickle(path, file, known, max_pickle_bytes)
        elif begin.startswith(_PICKLE):
            content = _first_name(file)
            raise CheckpointError(
                f"{path} is a plain Python pickle{f' of {content}' if content else ''}, not a file of torch.save: "
                f"reading it could run code, so it is not loaded. {_ADVICE}"
            )
        else:
            raise CheckpointError(
                f"{path} cannot be read as a torch file: it does not begin like one. {_TRUNCATED}"
            )


def _require_inert_archive(path: Path, known: frozenset[str], max_pickle_bytes: int) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            pickles = [record for record in records if record.filename.endswith("data.pkl")]
            # torch.save stores every record as it is, once.
            unfolds = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            if unfolds or sum(record.file_size for record in records) > path.stat().st_size:
                raise CheckpointError(
                    f"{path} is larger in memory than on the disk, which torch.save does not write. {_ADVICE}"
                )
            if len(pickles) != 1:
                raise CheckpointError(
                    f"{path} has {len(pickles)} pickles where a torch file has one. {_ADVICE}"
                )
            with archive.open(pickles[0]) as file:
                _require_inert_pickle(path, file, known, max_pickle_bytes)
    except (
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        OverflowError,
    ) as error:
        raise CheckpointError(f"{path} cannot be read as a torch file ({error}). {_TRUNCATED}") from error


def _require_inert_pickle(path: Path, file: IO[bytes], known: frozenset[str], max_pickle_bytes: int) -> None:
    """Goes through one pickle, to its end."""
    begin = file.tell()
    tuples: set[object] = set()
    tuple_uses = 0
    before = ""
    try:
        for operation, argument, position in pickletools.genops(file):
            if operation.name in _NAMING and (name := _dotted(operation.name, argument)) not in known:
                raise CheckpointError(
                    f"{path} holds a pickled {name}, which could run code, so it is not loaded. {_ADVICE}"
                )
            if before.startswith("TUPLE") and "PUT" in operation.name:
                tuples.add(argument)
            tuple_uses += "GET" in operation.name and argument in tuples
            if (position or 0) - begin > max_pickle_bytes or tuple_uses > _MOST_TUPLE_USES:
                raise CheckpointError(
                    f"{path} holds a pickle that is too complicated for a state dict. {_ADVICE}"
                )
            before = operation.name
    except (ValueError, EOFError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be read as a torch file ({error}). {_TRUNCATED}") from error


def _dotted(operation: str, argument: object) -> str:
    """What an operation names, as far as it says so by itself."""
    if operation not in ("GLOBAL", "INST"):
        return f"object ({operation})"
    return str(argument).replace(" ", ".").replace("__builtin__.", "builtins.")


def _first_name(file: IO[bytes]) -> str:
    """Dotted name of the first class or function that a plain pickle names; "" when it names none."""
    words: list[str] = []
    try:
        for operation, argument, position in pickletools.genops(file):
            if operation.name == "GLOBAL":
                return _dotted("GLOBAL", argument)
            if operation.name == "STACK_GLOBAL":
                return ".".join(words[-2:])
            if isinstance(argument, str):
                words = [*words[-1:], argument]
            if (position or 0) > MAX_PICKLE_BYTES:
                break
    except (ValueError, EOFError, IndexError):
        pass  # cut short or altered before it names one
    return ""


_NAMING: Final = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"})
_ADVICE: Final = (
    "Save the tensors alone (torch.save(model.state_dict(), ...) or safetensors) and give that file."
)
_TRUNCATED: Final = "It may be truncated: fetch it again, or save it again with a current torch."
