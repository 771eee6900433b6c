"""Names and paths that could harm tables, terminals and files are written in a harmless form, everywhere the same."""

import logging
from pathlib import Path

import pytest

from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import iter_records

NAMES = ["=1+1", "\x1b[2J", "../../x", "a/b", '"q', "contig_1", "\u202ex", "+1", "%2B1", "=1+1"]
WRITTEN = [
    "%3D1+1",
    "%1B[2J",
    "../../x",
    "a/b",
    "%22q",
    "contig_1",
    "%E2%80%AEx",
    "%2B1",
    "%2B1_dup2",
    "%3D1+1_dup2",
]


def test_used_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "in.fa"
    path.write_text("".join(f">{name} words\nACGTACGTACGT\n" for name in NAMES), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        store = build_frame_store([path], tmp_path / "frames", 60)
    assert store.record_names(0, len(NAMES)) == WRITTEN
    assert store.chunk_ids(0, 2) == ["%3D1+1_chunk_1", "%1B[2J_chunk_1"]
    assert "6 records have names that could do harm" in caplog.text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["frames", "in.fa"]


def test_rejected_records(tmp_path: Path) -> None:
    path = tmp_path / "=in\x1b.fa"
    path.write_text(">=1\n!!!!\n>ok\nACGTACGT\n", encoding="utf-8")
    build_frame_store([path], tmp_path / "frames", 60, rejected_copy=tmp_path / "rejected.tsv")
    rows = [line.split("\t") for line in (tmp_path / "rejected.tsv").read_text().splitlines()]
    assert rows[1][:3] == ["1", "%3D1", f"{tmp_path}/=in%1B.fa"]
    assert len(rows) == 2


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "gen\udce8me.fa"
    path.write_text(">a\n!!!!\n>ok\nACGTACGT\n")
    build_frame_store([path], tmp_path / "frames", 60, rejected_copy=tmp_path / "rejected.tsv")
    assert "gen%ED%B3%A8me.fa" in (tmp_path / "rejected.tsv").read_text(encoding="utf-8")


def test_control_characters_in_a_sequence(tmp_path: Path) -> None:
    path = tmp_path / "in.fa"
    path.write_bytes(b">a\nACG\x1c\x1bACGACGACGACGACGACGACGACG\0\nACG\x7f\n")
    (record,) = iter_records([path], "dna")
    assert record.sequence == b"ACG??ACGACGACGACGACGACGACGACG?ACG?"


def test_long_names_are_cut_and_stay_unique(tmp_path: Path) -> None:
    path = tmp_path / "in.fa"
    path.write_text("".join(f">{'a' * 2000}{number}\nACGTACGTACGT\n" for number in range(3)))
    store = build_frame_store([path], tmp_path / "frames", 60)
    names = store.record_names(0, 3)
    assert names == ["a" * 1000, "a" * 1000 + "_dup2", "a" * 1000 + "_dup3"]
