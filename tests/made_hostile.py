"""Hand-made hostile inputs, by name: huge declared sizes, endless work, odd names."""

import io
import json
import struct
from typing import Any, Final

import torch

from tests.made_models import tokenizer
from tests.made_pickles import archive

_MIB: Final = 1 << 20

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
    ),
    *("\x00", "\u202eexe.gpj", "../../../etc/passwd", "a/b", "..", "C:\\x", "a\x7fb", "\x9b31m", "\ufeffx"),
    *("%1B", "<script>", "|x|`y`", "[a](http://x)", "x_chunk_1F1", "x_dup2", "NA", "nan", "#", "\xad"),
    *("a" * 100_000, "\U0001f9ec" * 2000),
)
# Replacements for any JSON value.
HOSTILE_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 1e308, 1e-320, 0.5, -0.0),
    *(float("inf"), float("-inf"), float("nan")),
    *("", "\0", "\ud800", "\x1b[31m", "\u202e", "=1+1", "../../etc/passwd", "a" * 10_000, "1", "NaN"),
    *([], {}, [[]], [None], {"": None}, {"a": {"a": {}}}, [0] * 10_000),
)


def hostile_json(key: str) -> dict[str, bytes]:
    """JSON documents that no reader expects."""
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


def safetensors_headers() -> dict[str, bytes]:
    """Files that declare more than they hold."""

    def made(header: bytes, size: int | None = None, body: bytes = bytes(16)) -> bytes:
        return struct.pack("<Q", len(header) if size is None else size) + header + body

    def tensor(shape: list[int], end: int = 16, kind: str = "F32", name: str = "a") -> bytes:
        return json.dumps({name: {"dtype": kind, "shape": shape, "data_offsets": [0, end]}}).encode()

    many = b",".join(b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(200_000))
    kinds = ("F4", "F8_E8M0", "C64", "U64", "X", "")
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
        **{f"dtype {kind}": made(tensor([4], kind=kind)) for kind in kinds},
        "layer 10^11": made(tensor([4], name="layers.99999999999.x")),
        "200,000 tensors": made(b"{" + many + b"}", body=b""),
        "name of a terminal": made(tensor([4], name="\x1b[2J\nvirnuc: done")),
    }


def torch_files(names: list[str]) -> dict[str, bytes]:
    """torch.save files that declare more than they hold, named like a model's tensors."""
    one = torch.zeros(1)
    cyclic: dict[str, Any] = {}
    cyclic["model"] = cyclic
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    of_each: dict[str, torch.Tensor] = {
        "stride 0, 2 GB each": one.expand(1 << 14, 1 << 15),
        "stride 0, 2^62": one.expand(1 << 31, 1 << 31),
        "no dimensions": torch.tensor(1.0),
        "no elements": torch.zeros(0, 0),
        "complex": torch.zeros(4, 4, dtype=torch.complex64),
        "sparse": torch.zeros(4, 4).to_sparse(),
        "meta": torch.zeros(4, 4, device="meta"),
        "integers": torch.zeros(4, 4, dtype=torch.int64),
    }
    files: dict[str, object] = {
        **{name: dict.fromkeys(names, tensor) for name, tensor in of_each.items()},
        "one storage for all": dict.fromkeys(
            [f"{n}.{i}" for n in names for i in range(500)], torch.zeros(64, 64)
        ),
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


def hostile_tokenizers() -> dict[str, bytes]:
    """Tokenizers that never end, or give ids without an embedding."""
    words = ["[UNK]", "[CLS]", "[SEP]", "A", "C", "G", "T"]
    plain = json.loads(tokenizer(words).to_str())
    slow = {"pattern": {"Regex": "(A+)+(A+)+(A+)+$|(A|A)*B"}}
    multiply = {"type": "Replace", "pattern": {"String": "A"}, "content": "A" * 1_000_000}
    vocabulary = {word: number for number, word in enumerate(words)}
    in_document: dict[str, dict[str, Any]] = {
        "plain": {},
        "slow pre-tokenizer": {
            "pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": False, **slow}
        },
        "slow normalizer": {"normalizer": {"type": "Replace", "content": "A", **slow}},
        "letters that multiply": {"normalizer": multiply},
    }
    in_model: dict[str, dict[str, Any]] = {
        "ids of 32 bits": {"vocab": vocabulary | {"T": (1 << 32) - 1}},
        "ids with holes": {"vocab": vocabulary | {"T": 5000}},
        "no letter": {"vocab": {word: vocabulary[word] for word in words[:3]}},
        "no unknown": {"unk_token": None},
        "by chance": {"dropout": 0.5},
        "endless merges": {"merges": [["A", "A"]] * 100_000},
    }
    models = {name: {"model": plain["model"] | changes} for name, changes in in_model.items()}
    return {name: json.dumps(plain | changes).encode() for name, changes in (in_document | models).items()}
