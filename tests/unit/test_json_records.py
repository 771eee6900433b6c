"""Only JSON of the declared form becomes a dataclass."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from virnuc_core.files import from_json, parse_object


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    name: str
    share: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    kind: Literal["a", "b"]
    count: int
    parts: tuple[Part, ...]
    first: Part | None
    length: int | None = None
    is_done: bool = False


VALUES: dict[str, Any] = {
    "kind": "a",
    "count": 3,
    "parts": [{"name": "x"}, {"name": "y", "share": 1}],
    "first": None,
}


def test_a_record_is_made() -> None:
    made = from_json(Whole, VALUES)
    assert made == Whole(kind="a", count=3, parts=(Part(name="x"), Part(name="y", share=1)), first=None)
    again = asdict(made) | {"parts": [asdict(part) for part in made.parts]}
    assert from_json(Whole, again) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "c"}, "kind is 'c'"),
        ({"kind": ["a"]}, "kind is"),
        ({"count": "3"}, "count is '3'"),
        ({"count": True}, "count is True"),
        ({"count": 3.0}, "count is 3.0"),
        ({"parts": {}}, "parts is"),
        ({"parts": [{"name": "x"}, {"name": 1}]}, r"parts\[1\]\.name is 1"),
        ({"parts": [{}]}, r"parts\[0\]\.name is missing"),
        ({"parts": [{"name": "x", "share": float("nan")}]}, "share is nan"),
        ({"parts": [{"name": "x", "share": 10**400}]}, "share is 1000"),
        ({"first": [1]}, r"first\. is a list and no object"),
        ({"length": ""}, "length is ''"),
        ({"other": 1}, "'other' is not known"),
    ],
)
def test_another_form_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Whole, VALUES | change)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "[" * 100_000, '{"a":' * 100_000, b"\xff{}", '{"a": %s}' % ("9" * 5000)]
)
def test_what_is_no_object_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words are those of the parser
        parse_object(text)
