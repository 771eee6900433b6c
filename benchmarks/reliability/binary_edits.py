"""Hostile edits of structured files that leave their outer checks valid."""

import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any, Final

import h5py
import numpy as np

from benchmarks.reliability.malicious_pickles import archive
from benchmarks.reliability.mutations import HOSTILE_VALUES, mutate_bytes, mutate_document, mutate_json
from virnuc_core.checked_hdf5 import HDF5_ERRORS, write_attributes

_MOST_GROWTH: Final = 1 << 20
_SEALED_BY: Final = "attributes_sha256"
_HOSTILE_INTEGERS: Final = (0, 1, 2, 255, -1, 1 << 16, 1 << 30, (1 << 31) - 1, -(1 << 31), 1 << 40, 1 << 62)
_PICKLED_NAMES: Final = (
    *(b"torch\nFloatStorage", b"torch\nHalfStorage", b"torch\nLongStorage", b"torch\nComplexFloatStorage"),
    *(
        b"torch\nQInt8Storage",
        b"torch\nUntypedStorage",
        b"torch._utils\n_rebuild_tensor_v2",
        b"torch\nTensor",
    ),
    *(b"torch._utils\n_rebuild_parameter", b"torch._utils\n_rebuild_sparse_tensor", b"torch\nSize"),
    *(b"torch._utils\n_rebuild_meta_tensor_no_storage", b"torch._utils\n_rebuild_qtensor", b"torch\ndevice"),
    *(b"torch._utils\n_rebuild_nested_tensor", b"torch._tensor\n_rebuild_from_type_v2", b"builtins\nset"),
    *(b"collections\nOrderedDict", b"collections\nCounter", b"builtins\nbytearray", b"argparse\nNamespace"),
    *(b"torch.nn.parameter\nParameter", b"torch.nn.modules.linear\nLinear", b"__main__\nMLPClassifier"),
)


def mutate_safetensors(data: bytes, rng: Random) -> bytes:
    """Edits the header of a safetensors file, or bytes anywhere."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    changed = mutate_json(header, rng)
    declared = rng.choice((len(changed),) * 8 + (size, 0, len(changed) + 1, 1 << 31, (1 << 63) - 1))
    return struct.pack("<Q", declared) + changed + (body if rng.random() < 0.9 else mutate_bytes(body, rng))


def mutate_archive(data: bytes, rng: Random) -> bytes:
    """Edits the records of a torch.save file, or bytes anywhere."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        records = {info.filename.partition("/")[2]: zipped.read(info) for info in zipped.infolist()}
    for _ in range(rng.choice((1, 1, 2, 4))):
        _edit_records(records, rng)
    rebuilt = archive(records)
    if rng.random() < 0.1:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))) as zipped:
            for name, content in records.items():
                zipped.writestr(f"archive/{name}", content)
        rebuilt = buffer.getvalue()
    return rebuilt


def _edit_records(records: dict[str, bytes], rng: Random) -> None:
    name = rng.choice(list(records))
    match rng.randrange(8):
        case 0:
            records[name] = mutate_bytes(records[name], rng)
        case 1 if len(records) > 1:
            del records[name]
        case 2:
            records[rng.choice(("data/0", "data/../../x", "byteorder", "version"))] = records[name]
        case _ if "data.pkl" in records:
            records["data.pkl"] = mutate_pickle(records["data.pkl"], rng)


def mutate_pickle(data: bytes, rng: Random) -> bytes:
    """Edits numbers, names and the order of a pickle's operations."""
    try:
        operations = list(pickletools.genops(data))
    except ValueError:  # an earlier edit has broken the pickle
        return mutate_bytes(data, rng)
    bounds = [position for _, _, position in operations if position is not None] + [len(data)]
    parts = [data[begin:end] for begin, end in pairwise(bounds)]
    place = rng.randrange(len(parts))
    match rng.randrange(5):
        case 0:
            parts[place] = parts[rng.randrange(len(parts))]
        case 1:
            parts.insert(place, parts[rng.randrange(len(parts))] * rng.choice((1, 1, 1000)))
        case 2:
            del parts[place]
        case _:
            kind = rng.choice(("GLOBAL", "BININT", "BININT1", "BININT2", "BINUNICODE"))
            places = [i for i, (op, _, _) in enumerate(operations) if op.name == kind] or [place]
            place = rng.choice(places)
            parts[place] = _hostile_operation(kind, rng)
    return b"".join(parts)


def _hostile_operation(kind: str, rng: Random) -> bytes:
    if kind == "GLOBAL":
        return b"c" + rng.choice(_PICKLED_NAMES) + b"\n"
    if kind == "BINUNICODE":
        word = rng.choice(
            ("", "\0", "\x1b[2J", "storage", "cuda:0", "layers.99999999999.fc1.weight")
        ).encode()
        return b"X" + struct.pack("<I", len(word)) + word
    return b"\x8a\x09" + rng.choice(_HOSTILE_INTEGERS).to_bytes(9, "little", signed=True)


def mutate_hdf5(data: bytes, rng: Random) -> bytes:
    """Edits datasets, links and attributes of an HDF5 file, mostly with a valid checksum, or bytes anywhere."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    buffer = io.BytesIO(data)
    with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
        for _ in range(rng.choice((1, 1, 2))):
            try:
                rng.choice(_HDF5_EDITS)(file, rng)
            except HDF5_ERRORS:
                continue  # the library refuses to write such a file
    return buffer.getvalue()


def _edit_attributes(file: h5py.File, rng: Random) -> None:
    """Edits attributes and makes the checksum valid again, so that a reader gets to the values."""
    attributes = {name: value if isinstance(value, str) else int(value) for name, value in file.attrs.items()}
    attributes.pop(_SEALED_BY, None)
    for name in ("models", "counters"):
        if name in attributes and rng.random() < 0.4:
            attributes[name] = mutate_json(str(attributes[name]).encode(), rng).decode()
    if rng.random() < 0.7:
        attributes = mutate_document(attributes, rng)
    for name in list(file.attrs):
        del file.attrs[name]
    if isinstance(attributes, dict):
        known = {n: v for n, v in attributes.items() if _fits_attribute(n, v)}
        write_attributes(file, known)


def _fits_attribute(name: str, value: Any) -> bool:
    text = [name, value] if isinstance(value, str) else [name]
    is_number = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    fits = all("\0" not in part and part.isprintable() and len(part) < 60_000 for part in text)
    return bool(name) and fits and (is_number or isinstance(value, str))


def _odd_attribute(file: h5py.File, rng: Random) -> None:
    """An attribute of a type that virnuc never writes."""
    name = rng.choice([*file.attrs, "another"])
    odd = (h5py.Empty("f4"), np.arange(5), b"\xff\xfe", np.array(["a", "b"], "S2"), np.nan, file.ref, True)
    file.attrs[name] = rng.choice(odd)


def _replace_dataset(file: h5py.File, rng: Random) -> None:
    name, old = _any_dataset(file, rng)
    values = old[()]
    del file[name]
    odd: tuple[Callable[[], object], ...] = (
        lambda: None,
        lambda: file.create_group(name),
        lambda: file.create_dataset(name, data=values[: len(values) // 2]),
        lambda: file.create_dataset(name, data=np.repeat(values, 2, axis=0)),
        lambda: file.create_dataset(name, data=values.T),
        lambda: file.create_dataset(name, data=values[None]),
        lambda: file.create_dataset(name, data=values.ravel()[0]),
        lambda: file.create_dataset(name, data=h5py.Empty("f4")),
        lambda: file.create_dataset(name, data=np.zeros((0, 3))),
        lambda: file.create_dataset(name, data=values.astype("S3")),
        lambda: file.create_dataset(name, data=np.full(len(values), b"\xff\x1b[2J\n=1")),
        lambda: file.create_dataset(name, data=np.zeros(len(values), [("a", "f4"), ("b", "S4")])),
        lambda: file.create_dataset(name, data=["text"] * len(values), dtype=h5py.string_dtype()),
        lambda: file.create_dataset(name, data=np.zeros(values.shape, "c8")),
        lambda: file.create_dataset(name, data=np.full(values.shape, np.nan)),
        lambda: file.create_dataset(name, shape=(len(values),), dtype=h5py.ref_dtype),
        lambda: file.create_dataset(name, shape=(len(values),), dtype=h5py.vlen_dtype(np.float32)),
    )
    rng.choice(odd)()


def _huge_dataset(file: h5py.File, rng: Random) -> None:
    """A shape without storage behind it."""
    name, old = _any_dataset(file, rng)
    rows = rng.choice((1 << 20, 1 << 27, 1 << 33, 1 << 40, len(old)))
    width = (rng.choice((1, 96, 1 << 16, 1 << 28)),) * (old.ndim - 1)
    del file[name]
    file.create_dataset(
        name, (rows, *width), rng.choice(("f4", "S100", "f8")), chunks=(min(rows, 64), *width)
    )


def _linked_dataset(file: h5py.File, rng: Random) -> None:
    """Content linked from elsewhere."""
    name, old = _any_dataset(file, rng)
    shape, kind = old.shape, old.dtype
    del file[name]
    match rng.randrange(4):
        case 0:
            file[name] = h5py.SoftLink(rng.choice((f"/{name}", "/dna", "/nowhere")))
        case 1:
            file[name] = h5py.ExternalLink(rng.choice(("/etc/passwd", "other.h5", "/dev/zero")), "/dna")
        case 2:
            file.create_dataset(name, shape, "u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
        case _:
            layout = h5py.VirtualLayout(shape, kind)
            layout[:] = h5py.VirtualSource(rng.choice((".", "other.h5")), rng.choice(("dna", name)), shape)
            file.create_virtual_dataset(name, layout)


def _any_dataset(file: h5py.File, rng: Random) -> tuple[str, h5py.Dataset]:
    own = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
    # Reading a virtual dataset that refers to itself crashes the process.
    sets = [name for name in own if isinstance(file[name], h5py.Dataset) and not file[name].is_virtual]
    names = [name for name in sets if file[name].ndim and file[name].nbytes < _MOST_GROWTH]
    if not names:
        return "dna", file.create_dataset("dna", data=np.zeros((4, 8), np.float32))
    name = rng.choice(names)
    return name, file[name]


_HDF5_EDITS: Final = (
    *(_edit_attributes, _edit_attributes, _odd_attribute, _replace_dataset, _replace_dataset),
    *(_huge_dataset, _linked_dataset),
)


def hostile_json(key: str) -> dict[str, bytes]:
    """JSON documents that no reader expects, by name."""
    deep = b"[" * 200_000 + b"]" * 200_000
    return {
        "nothing": b"",
        "deep list": deep,
        "deep object": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        "deep value": b'{"%s": ' % key.encode() + deep + b"}",
        "long number": b'{"%s": ' % key.encode() + b"9" * 10_000 + b"}",
        "infinite number": b'{"%s": 1e999}' % key.encode(),
        "byte order mark": b"\xef\xbb\xbf{}",
        "UTF-16": "{}".encode("utf-16"),
        "NUL bytes": bytes(10_000),
        **{f"value {i}": json.dumps(value).encode() for i, value in enumerate(HOSTILE_VALUES)},
        **{f"{key} {i}": json.dumps({key: value}).encode() for i, value in enumerate(HOSTILE_VALUES)},
    }
