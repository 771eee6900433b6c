"""A file is whole or absent."""

import os
from pathlib import Path

import pytest

from virnuc_core.files import (
    atomic_path,
    iter_temporaries,
    remove_temporaries,
    temporary_name,
    write_text,
)


def test_the_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_content_and_then_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        steps.append(
            "fsync folder" if os.path.samestat(os.fstat(descriptor), tmp_path.stat()) else "fsync file"
        )
        fsync(descriptor)

    def recording_replace(source: Path, target: Path) -> None:
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    write_text(tmp_path / "table.tsv", "whole")
    assert steps == ["fsync file", "replace", "fsync folder"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    write_text(path, "old")

    def write_half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    temporary_name(path).write_text("half of an earlier attempt, longer than the file")
    write_text(path, "Grüße")
    assert path.read_text(encoding="utf-8") == "Grüße"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        write_text(tmp_path / "missing" / "table.tsv", "")


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


def test_what_killed_writers_left_is_removed_by_name(tmp_path: Path) -> None:
    names = [
        ".shard_1.h5.0123456789abcdef.tmp",
        ".shard_1.h5.fedcba9876543210.tmp",
        ".shard_1.h5.tmp",
        ".shard_2.h5.0123456789abcdef.tmp",
        ".mine.tmp",
        "shard_1.h5",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert [name for _, name in iter_temporaries(tmp_path)] == ["mine", *["shard_1.h5"] * 3, "shard_2.h5"]
    remove_temporaries(tmp_path, {"shard_1.h5"})
    assert {path.name for path in tmp_path.iterdir()} == {*names[3:]}
    remove_temporaries(tmp_path / "absent", {"shard_1.h5"})
