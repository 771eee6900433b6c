"""JSON from files into frozen dataclasses, with every value of the type that the class declares."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

_LARGEST: Final = 1e300  # of a number that may become a float; NaN is not smaller


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Reads one JSON object.

    Raises:
        ValueError: it is no JSON, nested too deeply to be read, or another value than an object.
    """
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__} and no object")
    return document


def record_of(kind: type[Record], values: object, where: str = "") -> Record:
    """Makes a dataclass, and those within it, from parsed JSON.

    Args:
        kind: the dataclass; its fields may be numbers, strings, Literals, tuples, other dataclasses, and unions of these.
        values: an object of exactly its fields; those with defaults may be missing.
        where: path of the object in the document, for messages.

    Raises:
        ValueError: a field is missing, unknown, or of another type; it is named.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'it'} is a {type(values).__name__} and no object")
    hints = _hints(kind)  # type: ignore[arg-type]
    known = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    if unknown := sorted(set(map(str, values)) - set(known)):
        raise ValueError(f"{where}{unknown[0][:40]!r} is not known")
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where}{missing[0]} is missing")
    return kind(**{name: _value_of(hints[name], value, f"{where}{name}") for name, value in values.items()})


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value_of(hint: Any, value: Any, where: str) -> Any:
    """The value in the form of a type, or a ValueError."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        options = get_args(hint)
        if value is None and NoneType in options:
            return None
        (hint,) = (option for option in options if option is not NoneType)
        return _value_of(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value_of(get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if is_dataclass(hint) and isinstance(hint, type):
        return record_of(hint, value, f"{where}.")
    if origin is Literal:
        fits = isinstance(value, str) and value in get_args(hint)
    elif hint is float:
        fits = type(value) in (int, float) and abs(value) < _LARGEST
    else:
        fits = type(value) is hint
    if not fits:
        raise ValueError(f"{where} is {value!r:.60}")
    return value
