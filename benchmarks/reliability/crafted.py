"""Hand-made hostile inputs, by name: decompression bombs, huge declared sizes, odd names."""

import bz2
import gzip
import io
import json
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Final

import h5py
import numpy as np
import torch
from backports import zstd

from benchmarks.reliability.malicious_pickles import archive
from virnuc_core.checked_hdf5 import write_attributes

_MIB: Final = 1 << 20
# More than a process with 2 GB can hold, in any string representation.
_BOMB_BYTES: Final = 3 << 30

HOSTILE_NAMES: Final = (
    *(
        "=HYPERLINK(1)",
        "+1+1",
        "-2+3",
        "@SUM(A1)",
        '"quoted',
        "'quoted",
        "\uff1d1",
        "\x1b[2J\x1b]0;owned\x07",
        "\x00",
    ),
    *(
        "\u202eexe.gpj",
        "../../../etc/passwd",
        "a/b",
        "..",
        "C:\\x",
        "a\x7fb",
        "\x9b31m",
        "\ufeffx",
        "%1B",
        "<script>",
    ),
    *(
        "a" * 100_000,
        "\U0001f9ec" * 2000,
        "|x|`y`",
        "[a](http://x)",
        "x_chunk_1F1",
        "x_dup2",
        "NA",
        "nan",
        "#",
        "\xad",
    ),
)


def odd_names(begin: bytes, end: bytes) -> dict[str, bytes]:
    """Records with names that could harm tables, terminals or files."""
    return {f"name {n[:12]!r}": begin + n.encode() + end for n in HOSTILE_NAMES} | {
        "all names twice": b"".join(begin + n.encode() + end for n in HOSTILE_NAMES * 2)
    }


def fasta_layouts() -> dict[str, bytes]:
    """FASTA layouts that cost time or memory."""
    return {
        "only line ends": b"\n" * (8 * _MIB),
        "only carriage returns": b"\r" * (8 * _MIB),
        "blanks before a record": b" \t\n" * (2 * _MIB) + b">a\nACGT\n",
        "one letter a line": b">a\n" + b"A\n" * (2 * _MIB),
        "one line": b">a\n" + b"ACGT" * (_MIB // 2),
        "empty records": b">\n" * 50_000,
        "records of one letter": b">a\nA\n" * 10_000,
        "endless header": b">" * (16 * _MIB),
        "endless comment": b"#" * (16 * _MIB) + b"\n>a\nACGT\n",
        "comments": b"#\n" * _MIB + b">a\nACGT\n",
        "NUL bytes": bytes(_MIB),
        "FASTQ without line ends": b"@a" + b"A" * (16 * _MIB),
        "surrogate in UTF-8": b">\xed\xa0\x80\nACGT\n",
    }


def bombs() -> Iterator[tuple[str, bytes]]:
    """Compressed files of a few kB that decompress to more than 2 GB, or request as much memory."""
    one_record = {"one line": b"A", "one letter a line": b"A\n", "header": b">"}
    for content, piece in one_record.items():
        block = piece * (16 * _MIB // len(piece))
        yield f"zst bomb, {content}", _members(zstd.compress, b">a\n", block)
    yield "zst bomb, line ends", _members(zstd.compress, b"", b"\n" * (16 * _MIB))
    yield "zst bomb, FASTQ", _members(zstd.compress, b"@a\n", b"A" * (16 * _MIB))
    records = (b">a\n" + b"ACGT" * 500 + b"\n") * (2 * _MIB // 2000)
    for name, compress in (("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)):
        yield f"{name} bomb, one line", _members(compress, b">a\n", b"A" * (16 * _MIB))
        yield f"{name} of records", compress(records)
    yield "gz in gz", gzip.compress(gzip.compress(b">a\nACGT\n"))
    # A frame that asks for a window of 1 TB.
    yield "zst with a huge window", bytes.fromhex("28b52ffd00f0") + bytes(64)
    yield "zst that declares 16 EB", bytes.fromhex("28b52ffde0") + b"\xff" * 8 + bytes(64)
    yield "empty members", gzip.compress(b"", mtime=0) * 20_000 + gzip.compress(b">a\nACGT\n")


def _members(compress: Any, begin: bytes, block: bytes) -> bytes:
    """Concatenated compressed members: `begin`, then `block` repeatedly."""
    return bytes(compress(begin)) + bytes(compress(block)) * (_BOMB_BYTES // len(block))


def safetensors_headers() -> dict[str, bytes]:
    """Files that declare more than they hold."""

    def made(header: bytes, size: int | None = None, body: bytes = bytes(16)) -> bytes:
        return struct.pack("<Q", len(header) if size is None else size) + header + body

    def tensor(shape: list[int], end: int = 16, kind: str = "F32") -> bytes:
        return json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": [0, end]}}).encode()

    return {
        "empty file": b"",
        "size of 8 EB": made(b"{}", (1 << 63) - 1),
        "size of 90 MB": made(b"{}", 90_000_000),
        "header of nothing": made(b""),
        "deep header": made(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "shape of 2^62": made(tensor([1 << 31, 1 << 31])),
        "shape overflows": made(tensor([1 << 33, 1 << 33])),
        "zero times 2^62": made(tensor([0, 1 << 62], 0), body=b""),
        "negative shape": made(tensor([-4])),
        "data of 1 TB": made(tensor([1 << 38], 1 << 40)),
        **{
            f"dtype {kind}": made(tensor([4], kind=kind)) for kind in ("F4", "F8_E8M0", "C64", "U64", "X", "")
        },
        "layer 10^11": made(b'{"layers.99999999999.x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
        "a million tensors": made(
            b"{"
            + b",".join(b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(200_000))
            + b"}",
            body=b"",
        ),
        "name of a terminal": made(
            json.dumps(
                {"\x1b[2J\nvirnuc: done": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
            ).encode()
        ),
    }


def torch_files(names: list[str]) -> dict[str, bytes]:
    """torch.save files that declare more than they hold, named like a model's tensors."""
    one = torch.zeros(1)
    wide = {name: one.expand(1 << 14, 1 << 15) for name in names}
    cyclic: dict[str, Any] = {}
    cyclic["model"] = cyclic
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    files: dict[str, object] = {
        "stride 0, 2 GB each": wide,
        "stride 0, 2^62": {name: one.expand(1 << 31, 1 << 31) for name in names},
        "one storage for all": dict.fromkeys(
            [f"{n}.{i}" for n in names for i in range(500)], torch.zeros(64, 64)
        ),
        "no dimensions": dict.fromkeys(names, torch.tensor(1.0)),
        "no elements": dict.fromkeys(names, torch.zeros(0, 0)),
        "complex": dict.fromkeys(names, torch.zeros(4, 4, dtype=torch.complex64)),
        "sparse": dict.fromkeys(names, torch.zeros(4, 4).to_sparse()),
        "meta": dict.fromkeys(names, torch.zeros(4, 4, device="meta")),
        "integers": dict.fromkeys(names, torch.zeros(4, 4, dtype=torch.int64)),
        "nested dictionaries": cyclic,
        "nested lists": deep,
        "numbers for names": {i: torch.zeros(2) for i in range(5)},
        "layer 10^11": {f"{name}.layers.99999999999.x": torch.zeros(2) for name in names},
        "a tensor": torch.zeros(4),
        "None": None,
    }
    made = {}
    for name, content in files.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        made[name] = buffer.getvalue()
    return made


def compressed_archive() -> bytes:
    """A 1 MB torch file that holds 1 GB of pickled strings."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped,
        zipped.open("archive/data.pkl", "w") as file,
    ):
        file.write(b"\x80\x02")
        block = (b"X" + struct.pack("<I", _MIB) + bytes(_MIB)) * 16
        for _ in range(_BOMB_BYTES // len(block) // 3):
            file.write(block)
    return buffer.getvalue()


def module_of_modules() -> bytes:
    """A pickled module in which every child is one module twice, forty deep: 2^40 paths."""
    state = b"}(X\x0b\x00\x00\x00_parameters}X\x08\x00\x00\x00_buffers}X\x08\x00\x00\x00_modules}"
    linear = b"ctorch.nn.modules.linear\nLinear\n)\x81"
    pickled = b"\x80\x02" + linear + state + b"ubq\x00"
    for depth in range(40):
        before = b"h" + bytes([depth])
        children = b"(X\x01\x00\x00\x00a" + before + b"X\x01\x00\x00\x00b" + before + b"u"
        pickled += linear + state + children + b"ubq" + bytes([depth + 1])
    return archive({"data.pkl": pickled + b".", "version": b"3\n", "byteorder": b"little"})


def hdf5_files(valid: bytes) -> dict[str, bytes]:
    """HDF5 files that declare more than they hold."""
    made = {}
    for name in ("dna", "scores", "frame_ids"):
        for rows, width in ((1 << 27, 1 << 7), (1 << 40, 16), (8, 1 << 27)):
            made[f"{name} of {rows} x {width}"] = _with_dataset(valid, name, (rows, width), None)
        made[f"{name} that inflates to 3 GB"] = _with_dataset(
            valid, name, (_BOMB_BYTES // 4, 1), zlib.compress(bytes(1 << 28))
        )
    ids = _with_dataset(valid, "frame_ids", (4,), None, "S400000000")
    return made | {"ids of 400 MB each": ids, "signature alone": valid[:8], "nothing": b""}


def _with_dataset(
    valid: bytes, name: str, shape: tuple[int, ...], inflated: bytes | None, kind: str = "f4"
) -> bytes:
    """Adds a dataset with at most one stored chunk: `inflated`, compressed."""
    buffer = io.BytesIO(valid)
    with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
        if name in file:
            del file[name]
        piece = (shape[0] if inflated else 1, *shape[1:])
        data = file.create_dataset(
            name, shape, kind, chunks=piece if inflated else True, compression=9 if inflated else None
        )
        if inflated:
            data.id.write_direct_chunk((0,) * len(shape), inflated)
        attributes = {n: v if isinstance(v, str) else int(v) for n, v in file.attrs.items()}
        attributes.pop("attributes_sha256")
        attributes[f"{name}_sha256"] = "0" * 64
        write_attributes(file, attributes)
    return buffer.getvalue()


def numbers_of(kind: str, values: list[int]) -> bytes:
    """A column file."""
    return np.array(values, kind).tobytes()


def tokenizers() -> dict[str, bytes]:
    """Tokenizers that never end, or give ids without an embedding."""
    words = ["[UNK]", "[CLS]", "[SEP]", "A", "C", "G", "T"]
    ends = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    ends.append({"SpecialToken": {"id": "[SEP]", "type_id": 0}})
    special = {
        word: {"id": word, "ids": [words.index(word)], "tokens": [word]} for word in ("[CLS]", "[SEP]")
    }

    def made(changes: dict[str, Any], model: dict[str, Any]) -> bytes:
        bpe = {
            "type": "BPE",
            "vocab": {w: i for i, w in enumerate(words)},
            "merges": [],
            "unk_token": "[UNK]",
        }
        document: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": ends,
                "pair": ends,
                "special_tokens": special,
            },
            "decoder": None,
            "model": bpe | model,
        }
        return json.dumps(document | changes).encode()

    slow = {"Regex": "(A+)+(A+)+(A+)+$|(A|A)*B"}
    behavior = {"behavior": "Isolated", "invert": False}
    return {
        "plain": made({}, {}),
        "slow pre-tokenizer": made({"pre_tokenizer": {"type": "Split", "pattern": slow, **behavior}}, {}),
        "slow normalizer": made({"normalizer": {"type": "Replace", "pattern": slow, "content": "A"}}, {}),
        "letters that multiply": made(
            {"normalizer": {"type": "Replace", "pattern": {"String": "A"}, "content": "A" * 1_000_000}}, {}
        ),
        "ids of 32 bits": made({}, {"vocab": {w: i for i, w in enumerate(words[:6])} | {"T": (1 << 32) - 1}}),
        "ids with holes": made({}, {"vocab": {w: i for i, w in enumerate(words[:6])} | {"T": 5000}}),
        "no letter": made({}, {"vocab": {w: i for i, w in enumerate(words[:3])}}),
        "no unknown": made({}, {"unk_token": None}),
        "by chance": made({}, {"dropout": 0.5}),
        "endless merges": made({}, {"merges": [["A", "A"]] * 100_000}),
    }
