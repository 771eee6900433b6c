"""Weight files that would run a command if their pickle were loaded without restrictions.

Every way of a pickle to name a function and to call it, in every kind of file that torch.load opens. Unrestricted
`pickle.loads` of a payload in `RUNS` creates the file `marker`, which is how its test knows that the payload is real.
"""

import io
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_DICT: Final = b"ccollections\nOrderedDict\n)R"
_SYSTEM: Final = b"cposix\nsystem\n"


def _text(value: str) -> bytes:
    """BINUNICODE."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _called(function: str, *arguments: bytes) -> bytes:
    """GLOBAL, a tuple of arguments, REDUCE."""
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR"


def _running(marker: Path) -> dict[str, bytes]:
    """Operations, without protocol and end, that create the marker when Python's own pickle loads them."""
    shell, python = _text(f"touch {marker}"), _text(f"open({str(marker)!r}, 'w').close()")
    system, module = _called("posix.system", shell), _called("importlib.import_module", _text("posix"))
    return {
        "GLOBAL os.system": _called("os.system", shell),
        "GLOBAL posix.system": system,
        "GLOBAL __builtin__.eval": _called("__builtin__.eval", python),
        "getattr": _called("builtins.getattr", module, _text("system")) + shell + b"\x85R",
        "STACK_GLOBAL": b"\x8c\x05posix\x8c\x06system\x93" + shell + b"\x85R",
        "INST": b"(" + shell + b"iposix\nsystem\n",
        "OBJ": b"(" + _SYSTEM + shell + b"o",
        "REDUCE inside a state dict": _DICT + b"(" + _text("hidden_layer.weight") + system + b"u",
        "BUILD with __setstate__": _DICT + b"}(" + _text("x") + system + b"ub",
        "BUILD of a Namespace": b"cargparse\nNamespace\n)\x81}(" + _text("model") + system + b"ub",
    }


def _refused(marker: Path) -> dict[str, bytes]:
    """Operations that Python's pickle does not load, or only in another environment, or without creating the marker."""
    shell = _text(f"touch {marker}")
    system, words = _called("posix.system", shell), b"(](" + _text("touch") + _text(str(marker)) + b"et"
    rebuilt = _called("torch._tensor._rebuild_from_type_v2", _SYSTEM, _SYSTEM, b"(" + shell + b"t", b"}")
    popen = b"(" + _text("__class__") + b"csubprocess\nPopen\nu"
    return {
        "tensor rebuilt by a command": rebuilt,
        "storage from bytes": _called("torch.storage._load_from_bytes", _as_bytes(system)),
        "torch.load": _called("torch.serialization.load", _text(str(marker))),
        "dotted way through an allowed class": b"\x8c\x08argparse\x8c\x1eNamespace.__init__.__globals__\x93",
        "class in __main__": b"c__main__\nMLPClassifier\n)\x81}(" + _text("x") + system + b"ub",
        "bytearray of 64 GB": _called("builtins.bytearray", b"\x8a\x05\x00\x00\x00\x00\x10"),
        "NEWOBJ": b"csubprocess\nPopen\n" + words + b"\x81",
        "NEWOBJ_EX": b"csubprocess\nPopen\n" + words + b"}\x92",
        "BUILD of a Namespace's class": b"cargparse\nNamespace\n)\x81N}" + popen + b"\x86b",
    }


def _pickled(operations: bytes) -> bytes:
    """With the protocol that they need, and an end."""
    protocol = b"\x80\x04" if b"\x93" in operations or b"\x92" in operations else b"\x80\x02"
    return protocol + operations + b"."


def _as_bytes(operations: bytes) -> bytes:
    """Their pickle as an argument."""
    return b"c_codecs\nencode\n(" + _text(_pickled(operations).decode("latin-1")) + _text("latin-1") + b"tR"


def payloads(marker: Path) -> dict[str, bytes]:
    """Pickles by name."""
    operations = _running(marker) | _refused(marker)
    return {name: _pickled(program) for name, program in operations.items()}


RUNS: Final = tuple(_running(Path("ran")))
PAYLOADS: Final = tuple(payloads(Path("ran")))


def archive(records: Mapping[str, bytes], name: str = "archive") -> bytes:
    """A torch.save file of torch 1.6 and later."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for record, content in records.items():
            zipped.writestr(f"{name}/{record}", content)
    return buffer.getvalue()


def _legacy(place: int, payload: bytes) -> bytes:
    """A torch.save file from before torch 1.6, with the payload replacing one of its five pickles."""
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": _PROTOCOL, "little_endian": True, "type_sizes": sizes}
    whole: tuple[object, ...] = (_MAGIC, _PROTOCOL, system, OrderedDict[str, object](), [])
    parts = [pickle.dumps(part, 2) for part in whole]
    parts[place] = payload
    return b"".join(parts)


def _tar(payload: bytes) -> bytes:
    """A torch.save file from before torch 0.1.10."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(payload)
            tar.addfile(entry, io.BytesIO(payload))
    return buffer.getvalue()


def _beside_a_state_dict(payload: bytes) -> bytes:
    """A complete state dict, with the payload as an additional record of its archive."""
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, buffer)
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as zipped:
        warnings.simplefilter("ignore")  # about two records of one name
        zipped.writestr("archive/data.pkl", payload)
    return buffer.getvalue()


_VERSION: Final = {"version": b"3\n"}
CONTAINERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "plain pickle": bytes,
    "torch archive": lambda payload: archive({"data.pkl": payload, **_VERSION, "byteorder": b"little"}),
    "archive in an archive": lambda payload: archive(
        {"data.pkl": archive({"data.pkl": payload}), **_VERSION}
    ),
    "pickle before an archive": lambda payload: payload + archive({"data.pkl": payload, **_VERSION}),
    "second data.pkl": _beside_a_state_dict,
    "TorchScript": lambda payload: archive(
        {"data.pkl": payload, "constants.pkl": payload, "code/__torch__.py": b"import os", **_VERSION}
    ),
    **{f"legacy pickle {place}": partial(_legacy, place) for place in (0, 2, 3, 4)},
    "tar": _tar,
}
