"""Hostile mutations of bytes and JSON documents, deterministic in their random generator."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any, Final

Mutation = Callable[[bytes, Random], bytes]

_NUMBERS: Final = (
    b"\x00" * 8,
    b"\xff" * 8,
    b"\xff" * 4,
    b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x80",
    b"\x01\x00\x00\x00",
)
_HOSTILE_TEXT: Final = (
    b"\x00",
    b"\x1b[2J\x1b]0;owned\x07",
    b"\r",
    b"\n\n",
    b"\xff\xfe",
    "\u202e".encode(),
    b"=1+1",
    b"%n%s",
)
_MOST_GROWTH: Final = 1 << 18

# Replacements for any JSON value.
HOSTILE_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 1e308, 1e-320, 0.5, -0.0),
    *(float("inf"), float("-inf"), float("nan")),
    *("", "\0", "\ud800", "\x1b[31m", "\u202e", "=1+1", "../../etc/passwd", "a" * 10_000, "1", "NaN"),
    *([], {}, [[]], [None], {"": None}, {"a": {"a": {}}}, [0] * 10_000),
)
_NESTED: Final = (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """One to sixteen edits anywhere."""
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        data = rng.choice(_BYTE_EDITS)(data, rng)
    return data


def splice_of(seeds: Sequence[bytes]) -> Mutation:
    """The beginning of the data and the end of one of the seeds."""

    def splice(data: bytes, rng: Random) -> bytes:
        other = rng.choice(seeds)
        return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]

    return splice


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Changes values, keys and nesting of a JSON document; its syntax mostly stays valid."""
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        document = mutate_document(document, rng)
    text = json.dumps(document).encode()
    if rng.random() < 0.02:
        begin = rng.randint(0, len(text))
        text = text[:begin] + rng.choice(_NESTED) + text[begin:]
    return text


def mutate_document(document: Any, rng: Random) -> Any:
    """Changes a random place of a parsed JSON document in place."""
    parents: list[tuple[Any, Any]] = []
    _collect_places(document, parents)
    if not parents or rng.random() < 0.02:
        return deepcopy(rng.choice(HOSTILE_VALUES))
    holder, key = rng.choice(parents)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", "\0", "shape", "begin", str(key) * 2))] = holder.pop(key)
        case 2:
            holder[key] = [holder[key]] * rng.choice((1, 2, 50))
        case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += rng.choice((-1, 1, 1 << 16, 1 << 31, 1 << 40, -(1 << 40)))
        case _:
            holder[key] = deepcopy(rng.choice(HOSTILE_VALUES))
    return document


def _collect_places(node: Any, places: list[tuple[Any, Any]]) -> None:
    """Every (container, key or index) below a node; only the ends of long lists."""
    if isinstance(node, dict):
        keys: Sequence[Any] = list(node)
    elif isinstance(node, list):
        keys = range(len(node))
    else:
        return
    for key in (*keys[:40], *keys[-2:]):
        places.append((node, key))
        _collect_places(node[key], places)


def _flip_bits(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_number(data: bytes, rng: Random) -> bytes:
    number = rng.choice(_NUMBERS)
    begin = rng.randint(0, len(data))
    return data[:begin] + number + data[begin + len(number) :]


def _truncate(data: bytes, rng: Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _cut_out(data: bytes, rng: Random) -> bytes:
    begin = rng.randint(0, len(data))
    return data[:begin] + data[begin + rng.randint(0, 64) :]


def _insert(data: bytes, rng: Random) -> bytes:
    begin = rng.randint(0, len(data))
    new = rng.choice((rng.choice(_HOSTILE_TEXT), rng.randbytes(rng.randint(1, 64))))
    return data[:begin] + new + data[begin:]


def _repeat(data: bytes, rng: Random) -> bytes:
    begin = rng.randint(0, len(data))
    part = data[begin : begin + rng.randint(1, 512)]
    times = rng.choice((1, 2, 16, 1024))
    return data[:begin] + (part * times)[:_MOST_GROWTH] + data[begin:]


def _move(data: bytes, rng: Random) -> bytes:
    source, target = rng.randint(0, len(data)), rng.randint(0, len(data))
    part = data[source : source + rng.randint(1, 64)]
    return data[:target] + part + data[target + len(part) :]


_BYTE_EDITS: Final[tuple[Mutation, ...]] = (
    *(_flip_bits, _flip_bits, _set_number, _truncate, _cut_out, _insert, _repeat, _move),
)
