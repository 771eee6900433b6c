"""Hostile edits of valid files, drawn by Hypothesis, which leave outer syntax and checksums mostly valid."""

import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any, Final

import h5py
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from benchmarks.reliability.hostile import HOSTILE_VALUES
from benchmarks.reliability.malicious_pickles import archive
from benchmarks.reliability.samples import COMPRESSIONS, fasta, fastq
from virnuc_core.checked_hdf5 import HDF5_ERRORS, write_attributes

Edit = Callable[[DrawFn, bytes], bytes]

_MAX_BYTES: Final = 1 << 18
_MAX_DATASET_BYTES: Final = 1 << 20
_CHECKSUM: Final = "attributes_sha256"
_PIECES: Final = st.binary(max_size=64) | st.sampled_from(
    (
        *(
            b"\x00" * 8,
            b"\xff" * 8,
            b"\xff" * 4,
            b"\xff\xff\xff\x7f",
            b"\x00\x00\x00\x80",
            b"\x01\x00\x00\x00",
        ),
        *(b"\x1b[2J\x1b]0;owned\x07", b"\r", b"\n\n", b"\xff\xfe", "\u202e".encode(), b"=1+1", b"%n%s"),
    )
)
_VALUES: Final = st.sampled_from(HOSTILE_VALUES).map(deepcopy) | st.integers() | st.floats() | st.text()
_FEW: Final = st.sampled_from((1, 1, 1, 2, 4, 16))
_NESTED: Final = (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
_INTEGERS: Final = (0, 1, 2, 255, -1, 1 << 16, 1 << 30, (1 << 31) - 1, -(1 << 31), 1 << 40, 1 << 62)
_PICKLED_NAMES: Final = tuple(
    f"{module}\n{name}\n".encode()
    for module, names in {
        "torch": "FloatStorage HalfStorage LongStorage ComplexFloatStorage QInt8Storage UntypedStorage Tensor Size device",
        "torch._utils": "_rebuild_tensor_v2 _rebuild_parameter _rebuild_sparse_tensor _rebuild_qtensor "
        "_rebuild_meta_tensor_no_storage _rebuild_nested_tensor",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch.nn.parameter": "Parameter",
        "torch.nn.modules.linear": "Linear",
        "builtins": "set bytearray",
        "collections": "OrderedDict Counter",
        "argparse": "Namespace",
        "__main__": "MLPClassifier",
    }.items()
    for name in names.split()
)
_PICKLED_WORDS: Final = ("", "\0", "\x1b[2J", "storage", "cuda:0", "layers.99999999999.fc1.weight")


@st.composite
def edited(draw: DrawFn, edit: Edit, valid: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Name and hostile content of one of the files; sometimes the beginning of one and the end of another."""
    names = sorted(valid)
    name = draw(st.sampled_from(names))
    if len(names) > 1 and _is_one_in(draw, 10):
        data, other = valid[name], valid[draw(st.sampled_from(names))]
        return name, data[: draw(st.integers(0, len(data)))] + other[draw(st.integers(0, len(other))) :]
    return name, edit(draw, valid[name])


def _is_one_in(draw: DrawFn, number: int) -> bool:
    return draw(st.integers(1, number)) == number


def edit_bytes(draw: DrawFn, data: bytes) -> bytes:
    """Overwrites, inserts, cuts out, moves or repeats pieces anywhere."""
    for _ in range(draw(_FEW)):
        begin = draw(st.integers(0, len(data)))
        piece = draw(_PIECES)
        if _is_one_in(draw, 3):  # from the file itself
            source = draw(st.integers(0, len(data)))
            times = draw(st.sampled_from((1, 1, 2, 16, 1024)))
            piece = (data[source : source + draw(st.integers(1, 512))] * times)[:_MAX_BYTES]
        removed = draw(st.sampled_from((len(piece), len(piece), 0)) | st.integers(0, len(data)))
        data = data[:begin] + piece + data[begin + removed :]
    return data


def edit_json(draw: DrawFn, data: bytes) -> bytes:
    """Changes values, keys and nesting of a JSON document, whose syntax mostly stays valid."""
    document = json.loads(data)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        document = _edit_document(draw, document)
    text = json.dumps(document).encode()
    if _is_one_in(draw, 50):
        begin = draw(st.integers(0, len(text)))
        text = text[:begin] + draw(st.sampled_from(_NESTED)) + text[begin:]
    return text


def _edit_document(draw: DrawFn, document: Any) -> Any:
    places = list(_places(document))
    if not places or _is_one_in(draw, 50):
        return draw(_VALUES)
    holder, key = draw(st.sampled_from(places))
    match draw(st.integers(0, 5)):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw(st.sampled_from(("", "\0", "shape", "begin", str(key) * 2)))] = holder.pop(key)
        case 2:
            holder[key] = [holder[key]] * draw(st.sampled_from((1, 2, 50)))
        case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += draw(st.sampled_from((-1, 1, 1 << 16, 1 << 31, 1 << 40, -(1 << 40))))
        case _:
            holder[key] = draw(_VALUES)
    return document


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) below a node; only the ends of long lists."""
    if isinstance(node, (dict, list)):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        for key in (*keys[:40], *keys[-2:]):
            yield node, key
            yield from _places(node[key])


def edit_json_or_bytes(draw: DrawFn, data: bytes) -> bytes:
    """Of a JSON document its values or its bytes, of another file its bytes."""
    is_document = data.startswith(b"{") and not _is_one_in(draw, 4)
    return edit_json(draw, data) if is_document else edit_bytes(draw, data)


def edit_lines(draw: DrawFn, data: bytes) -> bytes:
    """Edits and repeats some lines of a journal."""
    valid = data.splitlines()
    lines = list(valid)
    for _ in range(draw(st.sampled_from((1, 2, 4)))):
        place = draw(st.integers(0, len(lines) - 1))
        edit = edit_json_or_bytes if lines[place] in valid else edit_bytes
        lines[place] = edit(draw, lines[place])
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(valid)))
    return b"\n".join(lines) + draw(st.sampled_from((b"\n", b"")))


def edit_compressed(draw: DrawFn, data: bytes) -> bytes:
    """Edits compressed bytes, mostly found by the format's own checks, or their content."""
    if draw(st.booleans()):
        return edit_bytes(draw, data)
    compress = draw(st.sampled_from(list(COMPRESSIONS.values())))
    return compress(edit_bytes(draw, draw(st.sampled_from((fasta(), fastq())))))


def edit_safetensors(draw: DrawFn, data: bytes) -> bytes:
    """Edits the header of a safetensors file, or bytes anywhere."""
    if _is_one_in(draw, 3):
        return edit_bytes(draw, data)
    (size,) = struct.unpack("<Q", data[:8])
    header, body = edit_json(draw, data[8 : 8 + size]), data[8 + size :]
    wrong = (size, 0, len(header) + 1, 1 << 31, (1 << 63) - 1)
    declared = draw(st.sampled_from((*(len(header),) * 8, *wrong)))
    return struct.pack("<Q", declared) + header + (edit_bytes(draw, body) if _is_one_in(draw, 10) else body)


def edit_archive(draw: DrawFn, data: bytes) -> bytes:
    """Edits the records of a torch.save file, or bytes anywhere."""
    if _is_one_in(draw, 3):
        return edit_bytes(draw, data)
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        records = {info.filename.partition("/")[2]: zipped.read(info) for info in zipped.infolist()}
    for _ in range(draw(st.sampled_from((1, 1, 2, 4)))):
        name = draw(st.sampled_from(list(records)))
        match draw(st.integers(0, 7)):
            case 0:
                records[name] = edit_bytes(draw, records[name])
            case 1 if len(records) > 1:
                del records[name]
            case 2:
                new = draw(st.sampled_from(("data/0", "data/../../x", "byteorder", "version")))
                records[new] = records[name]
            case _ if "data.pkl" in records:
                records["data.pkl"] = _edit_pickle(draw, records["data.pkl"])
    if not _is_one_in(draw, 10):
        return archive(records)
    buffer = io.BytesIO()
    with zipfile.ZipFile(
        buffer, "w", draw(st.sampled_from((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)))
    ) as zipped:
        for name, content in records.items():
            zipped.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def _edit_pickle(draw: DrawFn, data: bytes) -> bytes:
    """Edits numbers, names and the order of a pickle's operations."""
    try:
        operations = list(pickletools.genops(data))
    except ValueError:  # an earlier edit has broken the pickle
        return edit_bytes(draw, data)
    bounds = [position for _, _, position in operations if position is not None] + [len(data)]
    parts = [data[begin:end] for begin, end in pairwise(bounds)]
    any_place = st.integers(0, len(parts) - 1)
    place, other = draw(any_place), draw(any_place)
    match draw(st.integers(0, 4)):
        case 0:
            parts[place] = parts[other]
        case 1:
            parts.insert(place, parts[other] * draw(st.sampled_from((1, 1, 1000))))
        case 2:
            del parts[place]
        case _:
            kind = draw(st.sampled_from(("GLOBAL", "BININT", "BININT1", "BININT2", "BINUNICODE")))
            places = [i for i, (op, _, _) in enumerate(operations) if op.name == kind] or [place]
            parts[draw(st.sampled_from(places))] = _operation(draw, kind)
    return b"".join(parts)


def _operation(draw: DrawFn, kind: str) -> bytes:
    if kind == "GLOBAL":
        return b"c" + draw(st.sampled_from(_PICKLED_NAMES))
    if kind == "BINUNICODE":
        word = draw(st.sampled_from(_PICKLED_WORDS)).encode()
        return b"X" + struct.pack("<I", len(word)) + word
    return b"\x8a\x09" + draw(st.sampled_from(_INTEGERS)).to_bytes(9, "little", signed=True)


def edit_hdf5(draw: DrawFn, data: bytes) -> bytes:
    """Edits datasets, links and attributes of an HDF5 file, mostly with a valid checksum, or bytes anywhere."""
    if _is_one_in(draw, 3):
        return edit_bytes(draw, data)
    buffer = io.BytesIO(data)
    with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
        for _ in range(draw(st.sampled_from((1, 1, 2)))):
            edit = draw(_HDF5_EDITS)
            try:
                edit(draw, file)
            except HDF5_ERRORS:
                continue  # the library refuses to write such a file
    return buffer.getvalue()


def _edit_attributes(draw: DrawFn, file: h5py.File) -> None:
    """Edits attributes and makes the checksum valid again, so that a reader gets to the values."""
    attributes: Any = {
        n: v if isinstance(v, str) else int(v) for n, v in file.attrs.items() if n != _CHECKSUM
    }
    for name in ("models", "counters"):
        if name in attributes and draw(st.booleans()):
            attributes[name] = edit_json(draw, str(attributes[name]).encode()).decode()
    if not _is_one_in(draw, 3):
        attributes = _edit_document(draw, attributes)
    for name in list(file.attrs):
        del file.attrs[name]
    if isinstance(attributes, dict):
        write_attributes(file, {name: value for name, value in attributes.items() if _fits(name, value)})


def _fits(name: str, value: Any) -> bool:
    """Whether this is an attribute that can be written."""
    is_number = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    texts = [name, value] if isinstance(value, str) else [name]
    is_written = all(text.isprintable() and len(text) < 60_000 for text in texts)
    return bool(name) and is_written and (is_number or isinstance(value, str))


def _odd_attribute(draw: DrawFn, file: h5py.File) -> None:
    """An attribute of a type that virnuc never writes."""
    odd = (h5py.Empty("f4"), np.arange(5), b"\xff\xfe", np.array(["a", "b"], "S2"), np.nan, file.ref, True)
    file.attrs[draw(st.sampled_from([*file.attrs, "another"]))] = odd[draw(st.integers(0, len(odd) - 1))]


def _replace_dataset(draw: DrawFn, file: h5py.File) -> None:
    """A dataset of another type or shape, a group, or nothing."""
    name, old = _any_dataset(draw, file)
    values, rows = old[()], len(old)
    del file[name]
    odd: tuple[dict[str, Any], ...] = (
        {},
        {"data": values[: rows // 2]},
        {"data": np.repeat(values, 2, axis=0)},
        {"data": values.T},
        {"data": values[None]},
        {"data": values.ravel()[:1].sum() if values.dtype.kind == "f" else 0},
        {"data": h5py.Empty("f4")},
        {"data": np.zeros((0, 3))},
        {"data": values.astype("S3")},
        {"data": np.full(rows, b"\xff\x1b[2J\n=1")},
        {"data": np.zeros(rows, [("a", "f4"), ("b", "S4")])},
        {"data": ["text"] * rows, "dtype": h5py.string_dtype()},
        {"data": np.zeros(values.shape, "c8")},
        {"data": np.full(values.shape, np.nan)},
        {"shape": (rows,), "dtype": h5py.ref_dtype},
        {"shape": (rows,), "dtype": h5py.vlen_dtype(np.float32)},
    )
    new = odd[draw(st.integers(0, len(odd) - 1))]
    if new:
        file.create_dataset(name, **new)
    elif draw(st.booleans()):
        file.create_group(name)


def _huge_dataset(draw: DrawFn, file: h5py.File) -> None:
    """A shape without storage behind it."""
    name, old = _any_dataset(draw, file)
    rows = draw(st.sampled_from((1 << 20, 1 << 27, 1 << 33, 1 << 40, len(old))))
    width = (draw(st.sampled_from((1, 96, 1 << 16, 1 << 28))),) * (old.ndim - 1)
    del file[name]
    kind = draw(st.sampled_from(("f4", "S100", "f8")))
    file.create_dataset(name, (rows, *width), kind, chunks=(min(rows, 64), *width))


def _linked_dataset(draw: DrawFn, file: h5py.File) -> None:
    """Content linked from elsewhere."""
    name, old = _any_dataset(draw, file)
    shape, kind = old.shape, old.dtype
    del file[name]
    match draw(st.integers(0, 3)):
        case 0:
            file[name] = h5py.SoftLink(draw(st.sampled_from((f"/{name}", "/dna", "/nowhere"))))
        case 1:
            target = draw(st.sampled_from(("/etc/passwd", "other.h5", "/dev/zero")))
            file[name] = h5py.ExternalLink(target, "/dna")
        case 2:
            file.create_dataset(name, shape, "u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
        case _:
            place = draw(st.sampled_from((".", "other.h5"))), draw(st.sampled_from(("dna", name)))
            layout = h5py.VirtualLayout(shape, kind)
            layout[:] = h5py.VirtualSource(*place, shape)
            file.create_virtual_dataset(name, layout)


def _any_dataset(draw: DrawFn, file: h5py.File) -> tuple[str, h5py.Dataset]:
    own = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
    # Reading a virtual dataset that refers to itself crashes the process.
    sets = [name for name in own if isinstance(file[name], h5py.Dataset) and not file[name].is_virtual]
    names = [name for name in sets if file[name].ndim and file[name].nbytes < _MAX_DATASET_BYTES]
    if not names:
        return "dna", file.create_dataset("dna", data=np.zeros((4, 8), np.float32))
    name = draw(st.sampled_from(names))
    return name, file[name]


_HDF5_EDITS: Final[SearchStrategy[Callable[[DrawFn, h5py.File], None]]] = st.sampled_from(
    (
        *(_edit_attributes, _edit_attributes, _odd_attribute, _replace_dataset, _replace_dataset),
        *(_huge_dataset, _linked_dataset),
    )
)
