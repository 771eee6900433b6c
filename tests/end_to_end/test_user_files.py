"""The user's files: what a command writes through, beside and over; test_refusals.py has what it does not write."""

import io
import json
import os
import sys
from pathlib import Path
from shutil import rmtree

import pytest

from tests.end_to_end.conftest import CommandLine, rows
from tests.end_to_end.test_refusals import FASTA, MINE, tree

TABLE = ("frames", "in.fa", "--chunk-length", 500)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("in.fa").write_text(FASTA)
    return folder


def test_a_table_goes_through_a_pipe_and_a_device(virnuc: CommandLine, here: Path) -> None:
    virnuc.done(*TABLE, "--out", "table.tsv")
    expected = Path("table.tsv").read_bytes()
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        virnuc.done(*TABLE, "--out", "pipe")
        assert Path("pipe").is_fifo()
        assert os.read(reader, 1 << 20) == expected
    finally:
        os.close(reader)
    Path("device").symlink_to("/dev/null")
    virnuc.done(*TABLE, "--out", "device")
    assert os.readlink("device") == "/dev/null"
    assert Path("device").is_char_device()
    assert not [name for name in tree(here) if name.startswith((".", "pipe.", "device."))]


def test_a_link_as_table_stays_and_its_target_is_written(virnuc: CommandLine, here: Path) -> None:
    Path("elsewhere").mkdir()
    Path("link.tsv").symlink_to("elsewhere/table.tsv")
    virnuc.done(*TABLE, "--out", "table.tsv")
    for _ in range(2):  # the target is new, and there
        virnuc.done(*TABLE, "--out", "link.tsv")
        assert os.readlink("link.tsv") == "elsewhere/table.tsv"
        assert Path("elsewhere/table.tsv").read_bytes() == Path("table.tsv").read_bytes()
    assert [path.name for path in Path("elsewhere").iterdir()] == ["table.tsv"]


def test_a_run_folder_may_be_a_link_and_files_of_other_names_stay(virnuc: CommandLine, here: Path) -> None:
    Path("place").mkdir()
    Path("place/notes.txt").write_text(MINE)
    Path("place/data").symlink_to("/")
    Path("run").symlink_to("place")
    virnuc.done("predict", "in.fa", "--out", "run")
    calls = Path("place/contigs.tsv").read_bytes()
    virnuc.done("predict", "in.fa", "--out", "run", "--force")
    assert Path("run").is_symlink()
    assert Path("run/contigs.tsv").read_bytes() == calls
    assert Path("place/notes.txt").read_text() == MINE
    # In the folder of a run, names that its run.json does not list are not its own.
    listed = json.loads(Path("run/run.json").read_text())
    listed["files"] = [record for record in listed["files"] if record["name"] != "contigs.tsv"]
    Path("run/run.json").write_text(json.dumps(listed))
    before = tree(here)
    virnuc.refused(2, "run/contigs.tsv", "predict", "in.fa", "--out", "run", "--force")
    assert tree(here) == before


def test_a_run_without_a_usable_record_is_begun_again_with_another_input(virnuc: CommandLine) -> None:
    Path("bad.fa").write_text(">bad\nEFILPQEFILPQ\n")
    virnuc.refused(3, "run/rejected.tsv lists them all", "predict", "bad.fa", "--out", "run")
    virnuc.done("predict", "in.fa", "--out", "run")


def test_an_output_file_of_another_run_is_replaced_with_force_alone(virnuc: CommandLine, here: Path) -> None:
    command = ("embed", "in.fa", "--model", "dnabert:tiny", "--out", "a.h5")
    virnuc.done(*command)
    virnuc.done(*command)
    rmtree("a.h5.run")
    before = tree(here)
    virnuc.refused(2, "--force", *command)
    assert tree(here) == before
    virnuc.done(*command, "--force")


def test_standard_input_is_called_by_its_name(
    virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables = []
    for run in ("one", "two"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FASTA.encode())))
        done = virnuc.done("predict", "-", "--out", run)
        assert "stdin" not in done.err
        tables.append({path.name: path.read_bytes() for path in Path(run).glob("*.tsv")})
        assert json.loads(Path(run, "run.json").read_text())["inputs"][0]["name"] == "-"
    assert tables[0] == tables[1]
    assert rows(Path("one/rejected.tsv"))[1][2] == "-"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    virnuc.refused(3, "-: no sequence record found", "predict", "-", "--out", "three")
