"""Files are complete or absent, and only JSON of the declared schema becomes a dataclass."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from virnuc_core.files import (
    atomic_path,
    from_json,
    make_private,
    parse_object,
    remove_temporaries,
    temporary_name,
    write_private,
    write_text,
)


def test_content_and_then_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, steps = tmp_path / "table.tsv", list[str]()
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        is_folder = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        steps.append("fsync folder" if is_folder else "fsync file")
        fsync(descriptor)

    def recording_replace(source: Path, target: Path) -> None:
        steps.append("replace")
        assert not target.exists()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    write_text(path, "Grüße")
    assert steps == ["fsync file", "replace", "fsync folder"]
    assert path.read_text(encoding="utf-8") == "Grüße"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match="missing"):
        write_text(tmp_path / "missing" / "table.tsv", "")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    temporary_name(path).write_text("half of a killed attempt, longer than the file")
    write_text(path, "old")

    def write_half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    with atomic_path(path, shared=True) as first:
        first.write_text("of the first")
        with atomic_path(path, shared=True) as second:
            assert second != first
            second.write_text("of the second")
        assert path.read_text() == "of the second"
    assert path.read_text() == "of the first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_secrets_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    """A group that shares a folder on purpose shares the databases in it, and no secret."""
    home, shared = tmp_path / "home", tmp_path / "shared"
    for folder, mode in ((home, 0o755), (shared, 0o2770)):
        folder.mkdir()
        folder.chmod(mode)
        (folder / "old.db").write_text("kept")
        (folder / "old.db").chmod(0o666)
    before = os.umask(umask)
    try:
        for folder in (home, shared):
            write_private(folder / "password", "secret")
            make_private(folder / "new.db")
            make_private(folder / "old.db")
    finally:
        os.umask(before)

    def modes(folder: Path) -> dict[str, int]:
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}

    assert modes(home) == {"password": 0o600, "new.db": 0o600, "old.db": 0o600}
    assert modes(shared) == {"password": 0o600, "new.db": 0o660, "old.db": 0o660}
    assert (home / "old.db").read_text() == "kept"
    assert (home / "password").read_text() == "secret"


def test_what_killed_writers_left_is_removed_by_name(tmp_path: Path) -> None:
    removed = [".shard_1.h5.0123456789abcdef.tmp", ".shard_1.h5.fedcba9876543210.tmp", ".shard_1.h5.tmp"]
    left = [".shard_2.h5.0123456789abcdef.tmp", ".mine.tmp", "shard_1.h5"]
    for name in (*removed, *left):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path, {"shard_1.h5"})
    assert {path.name for path in tmp_path.iterdir()} == set(left)
    remove_temporaries(tmp_path / "absent", {"shard_1.h5"})


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


VALUES: dict[str, Any] = {
    "kind": "a",
    "count": 3,
    "parts": [{"name": "x"}, {"name": "y", "share": 1}],
    "first": None,
}


def test_a_dataclass_is_made() -> None:
    parts = (Part(name="x"), Part(name="y", share=1))
    assert from_json(Whole, VALUES) == Whole(kind="a", count=3, parts=parts, first=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "c"}, "kind: .* 'a' or 'b'"),
        ({"count": "3"}, "count: .* integer"),
        ({"count": True}, "count: .* integer"),
        ({"count": 3.0}, "count: .* integer"),
        ({"parts": {}}, "parts: .* array"),
        ({"parts": [{"name": "x"}, {"name": 1}]}, r"parts\.1\.name: .* string"),
        ({"parts": [{}]}, r"parts\.0\.name: .* required"),
        ({"parts": [{"name": "x", "share": float("nan")}]}, "share: .* finite"),
        ({"first": [1]}, "first: .* object"),
        ({"other": 1}, "other: it is an unknown field"),
    ],
)
def test_another_form_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Whole, VALUES | change)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "[" * 100_000, '{"a":' * 100_000, b"\xff{}", '{"a": %s}' % ("9" * 5000)]
)
def test_what_is_no_object_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the parser's
        parse_object(text)
