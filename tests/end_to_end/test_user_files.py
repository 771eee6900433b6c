"""The user's files: a command that would lose one, or reach out of its run folder, is refused before it writes anything."""

import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree

import pytest

from tests.end_to_end.conftest import CommandLine, random_dna, rows

FASTA = f">a\n{random_dna(600, seed=1)}\n>bad\nEFILPQEFILPQ\n"
MINE = "nobody else has this\n"
VALUES = {"INPUT": FASTA, "MINE": MINE}
CLASSES = ("--viral", "in.fa", "--other", "other.fa")

# Arguments; files in the working folder, "-> TARGET" for a link; exit code; words of the message; words that are not in it.
Case = tuple[str, Mapping[str, str], int, tuple[str, ...], tuple[str, ...]]
REFUSED: Mapping[str, Case] = {
    "lock is a link": ("predict in.fa --out run", {"run/.virnuc.lock": "-> ../mine"}, 2, (".virnuc.lock", "link"), ()),
    "folder is a link, --force": (
        "predict in.fa --out run --force",
        {"run/shards": "-> ../elsewhere", "elsewhere/shard_00000.h5": "MINE"},
        2,
        ("run/shards", "link"),
        (),
    ),
    "link in a folder": (
        "predict in.fa --out run --force",
        {"run/shards/shard_00000.h5": "-> ../../mine"},
        2,
        ("run/shards/shard_00000.h5", "link"),
        (),
    ),
    "temporary file is a link": (
        "predict in.fa --out run",
        {"run/.contigs.tsv.tmp": "-> ../mine"},
        2,
        (".contigs.tsv.tmp", "link"),
        (),
    ),
    "run folder of embed": (
        "embed in.fa --model dnabert:tiny --out a.h5",
        {"a.h5.run/lanes": "-> ../elsewhere", "elsewhere/notes": "MINE"},
        2,
        ("a.h5.run/lanes", "link"),
        (),
    ),
    "input is a result": (
        "predict viral_contigs.fa.gz --out .",
        {"viral_contigs.fa.gz": "INPUT"},
        2,
        ("viral_contigs.fa.gz", "is the input"),
        (),
    ),
    "input is a result, --force": (
        "predict run/contigs.tsv in.fa --out run --force",
        {"run/contigs.tsv": "INPUT"},
        2,
        ("run/contigs.tsv", "is the input"),
        (),
    ),
    "input behind a link": (
        "predict link.fa --out .",
        {"link.fa": "-> regions.fa.gz", "regions.fa.gz": "INPUT"},
        2,
        ("link.fa", "is the input"),
        (),
    ),
    "input in a folder of the run": (
        "predict sequences/genbank_1.fa --out . --force",
        {"sequences/genbank_1.fa": "INPUT"},
        2,
        ("sequences/genbank_1.fa", "is the input"),
        (),
    ),
    "foreign tables": (
        "predict in.fa --out .",
        {"contigs.tsv": "MINE", "report.html": "MINE"},
        2,
        ("contigs.tsv", "report.html", "no run of virnuc made"),
        ("--force",),
    ),
    "foreign tables, --force": (
        "predict in.fa --out . --force",
        dict.fromkeys(("contigs.tsv", "regions.tsv", "regions.bed", "run.json", "predictions.tsv", "report.html", "embeddings.h5"), "MINE"),
        2,
        ("contigs.tsv", "and 2 more"),
        (),
    ),
    "foreign plan": (
        "predict in.fa --out .",
        {"plan.json": '{"plan": "holidays"}', "contigs.tsv": "MINE"},
        2,
        ("plan.json", "contigs.tsv"),
        ("--force",),
    ),
    "foreign plan, --force": (
        "predict in.fa --out . --force",
        {"plan.json": "MINE", "contigs.tsv": "MINE"},
        2,
        ("plan.json", "contigs.tsv"),
        ("--force",),
    ),
    "foreign shards, --force": (
        "predict in.fa --out . --force",
        {"shards/shard_1.h5": "MINE", "lanes": "MINE"},
        2,
        ("shards/shard_1.h5", "lanes"),
        (),
    ),
    "foreign embeddings": (
        "embed in.fa --model dnabert:tiny --out a.h5",
        {"a.h5": "MINE"},
        2,
        ("a.h5", "no embeddings file"),
        ("--force",),
    ),
    "foreign embeddings, --force": (
        "embed in.fa --model dnabert:tiny --out a.h5 --force",
        {"a.h5": "MINE"},
        2,
        ("a.h5", "no embeddings file"),
        ("--force",),
    ),
    "foreign head, --force": (
        "train --viral in.fa --other other.fa --out a.safetensors --force",
        {"a.safetensors": "MINE", "other.fa": "INPUT"},
        2,
        ("a.safetensors", "no head"),
        ("--force",),
    ),
    "foreign card of a head": (
        "train --viral in.fa --other other.fa --out readme.safetensors",
        {"readme.md": "MINE", "other.fa": "INPUT"},
        2,
        ("readme.md", "no run of virnuc made"),
        (),
    ),
    "foreign evaluation": (
        "evaluate --viral in.fa --other other.fa --out . --force",
        {"evaluation.json": "MINE", "other.fa": "INPUT"},
        2,
        ("evaluation.json", "no run of virnuc made"),
        (),
    ),
    "input is a conversion of evaluate": (
        "evaluate --viral sequences/genbank_1.fa --other in.fa --out .",
        {"sequences/genbank_1.fa": "INPUT"},
        2,
        ("sequences/genbank_1.fa", "is the input"),
        (),
    ),
    "input that is not UTF-8": (
        "predict caf\udce9.fa --out run",
        {"caf\udce9.fa": "INPUT"},
        2,
        (r"caf\udce9.fa", "not UTF-8"),
        (),
    ),
    "output that is not UTF-8": (
        "predict in.fa --out caf\udce9",
        {},
        2,
        (r"caf\udce9", "not UTF-8"),
        (),
    ),
    "table that is not UTF-8": (
        "frames in.fa --chunk-length 500 --out caf\udce9.tsv",
        {},
        2,
        (r"caf\udce9.tsv", "not UTF-8"),
        (),
    ),
    "labelled file that is not UTF-8": (
        "train --viral in.fa caf\udce9.fa --other other.fa --out a.safetensors",
        {"caf\udce9.fa": "INPUT", "other.fa": "INPUT"},
        2,
        (r"caf\udce9.fa", "not UTF-8"),
        (),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("in.fa").write_text(FASTA)
    Path("mine").write_text(MINE)
    return folder


def tree(folder: Path) -> dict[str, object]:
    """Every file, link and folder, with its content."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
    return found


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_written(case: Case, virnuc: CommandLine, here: Path) -> None:
    command, files, code, words, unsaid = case
    for name, content in files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            path.symlink_to(content.removeprefix("-> "))
        else:
            path.write_text(VALUES.get(content, content))
    before = tree(here)
    error = virnuc.refused(code, words[0], *command.split())
    assert tree(here) == before
    assert [word for word in words if word not in error] == []
    assert [word for word in unsaid if word in error] == []


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the bundled models."""
    from virnuc_cli.main import main

    folder = tmp_path_factory.mktemp("run")
    (folder / "in.fa").write_text(FASTA)
    assert main(["predict", str(folder / "in.fa"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


@pytest.fixture(params=["frames", "score"])
def table(request: pytest.FixtureRequest, embedded: Path) -> tuple[object, ...]:
    """A command that writes one table, without --out."""
    if request.param == "frames":
        return ("frames", "in.fa", "--chunk-length", 500)
    head = json.loads((embedded / "plan.json").read_text())["head"]["location"]
    return ("score", embedded / "embeddings.h5", "--head", head)


def test_a_table_goes_through_a_pipe_and_a_device(
    table: tuple[object, ...], virnuc: CommandLine, here: Path
) -> None:
    virnuc.done(*table, "--out", "table.tsv")
    expected = Path("table.tsv").read_bytes()
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        virnuc.done(*table, "--out", "pipe")
        assert Path("pipe").is_fifo()
        assert os.read(reader, 1 << 20) == expected
    finally:
        os.close(reader)
    Path("device").symlink_to("/dev/null")
    virnuc.done(*table, "--out", "device")
    assert os.readlink("device") == "/dev/null"
    assert Path("device").is_char_device()
    assert not [name for name in tree(here) if name.startswith((".", "pipe.", "device."))]


def test_a_link_as_table_stays_and_its_target_is_written(
    table: tuple[object, ...], virnuc: CommandLine, here: Path
) -> None:
    Path("elsewhere").mkdir()
    Path("link.tsv").symlink_to("elsewhere/table.tsv")
    virnuc.done(*table, "--out", "table.tsv")
    for _ in range(2):  # the target is new, and there
        virnuc.done(*table, "--out", "link.tsv")
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
