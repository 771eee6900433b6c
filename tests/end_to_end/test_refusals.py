"""What is refused before anything is written; arguments alone are in tests/unit/virnuc_cli/test_refusals.py."""

import os
from pathlib import Path

import pytest

from tests.end_to_end.conftest import CommandLine, random_dna

FASTA = f">a\n{random_dna(600, seed=1)}\n>bad\nEFILPQEFILPQ\n"
MINE = "nobody else has this\n"
CONTENT = {"": MINE, "fasta": FASTA, "json": '{"plan": "holidays"}'}
TABLES = "contigs.tsv virus_summary.tsv virus.bed run.json chunks.tsv report.html embeddings.h5"
EMBED, FRAMES = "embed in.fa --model dnabert:tiny --out", "frames in.fa --chunk-length"
PREDICT, TRAIN = "predict in.fa --out run", "train --viral in.fa --other other.fa --out"

# Command; files beside in.fa, of the user unless NAME=fasta, NAME=json or a link NAME->TARGET; exit code; words of the
# message, and behind "!" words that are not in it.
REFUSED: list[tuple[str, str, int, str]] = [
    (f"{PREDICT} --devices 99", "", 5, "99"),
    ("evaluate --viral s3://bucket/a.fa --other in.fa --out run", "", 2, "is a URL"),
    (f"{TRAIN} head.pth", "other.fa=fasta", 2, "must end in .safetensors"),
    ("inspect none", "", 3, "none"),
    ("models pull tiny", "", 2, "give esm2:tiny or dnabert:tiny"),
    ("models pull 650", "", 4, "unknown model 650"),
    ("models pull mine", "", 2, "is a local path"),
    ("doctor --compare tiny", "", 2, "give esm2:tiny or dnabert:tiny"),
    ("doctor --compare random:8M", "", 2, "has no files"),
    ("doctor --compare absent/model.pt", "", 4, "absent/model.pt"),
    # A link in the place of a file or folder of the run.
    (PREDICT, "run/.virnuc.lock->../mine", 2, ".virnuc.lock | link"),
    (PREDICT, "run/.contigs.tsv.tmp->../mine", 2, ".contigs.tsv.tmp | link"),
    (f"{PREDICT} --force", "run/shards->../elsewhere elsewhere/shard_00000.h5", 2, "run/shards | link"),
    (f"{PREDICT} --force", "run/shards/shard_00000.h5->../../mine", 2, "run/shards/shard_00000.h5 | link"),
    (f"{EMBED} a.h5", "a.h5.run/lanes->../elsewhere elsewhere/notes", 2, "a.h5.run/lanes | link"),
    # An input in the place of a result.
    (
        "predict virus.fa.gz --out .",
        "virus.fa.gz=fasta",
        2,
        "virus.fa.gz | overwrite its input",
    ),
    (
        "predict run/contigs.tsv in.fa --out run --force",
        "run/contigs.tsv=fasta",
        2,
        "run/contigs.tsv | overwrite its input",
    ),
    ("predict link.fa --out .", "link.fa->virus.gff3 virus.gff3=fasta", 2, "link.fa | overwrite its input"),
    (
        "predict sequences/genbank_1.fa --out . --force",
        "sequences/genbank_1.fa=fasta",
        2,
        "overwrite its input",
    ),
    (
        "evaluate --viral sequences/genbank_1.fa --other in.fa --out .",
        "sequences/genbank_1.fa=fasta",
        2,
        "overwrite its input",
    ),
    ("frames in.fa --chunk-length 300 --out link", "link->in.fa", 2, "is the input"),
    ("embed link --model dnabert:tiny --force --out in.fa", "link->in.fa", 2, "is the input"),
    ("score in.fa --head none.pth --out link", "link->in.fa", 2, "is the input"),
    ("score none.h5 --head link --out in.fa", "link->in.fa", 2, "is the input"),
    # Files of the user in the place of results.
    (
        "predict in.fa --out .",
        "contigs.tsv report.html",
        2,
        "contigs.tsv | report.html | was not made by virnuc | !--force",
    ),
    ("predict in.fa --out . --force", TABLES, 2, "contigs.tsv | and 2 more"),
    ("predict in.fa --out .", "plan.json=json contigs.tsv", 2, "plan.json | contigs.tsv | !--force"),
    ("predict in.fa --out . --force", "plan.json contigs.tsv", 2, "plan.json | contigs.tsv | !--force"),
    ("predict in.fa --out . --force", "shards/shard_1.h5 lanes", 2, "shards/shard_1.h5 | lanes"),
    (f"{EMBED} a.h5", "a.h5", 2, "a.h5 | not a virnuc embeddings file | !--force"),
    (f"{EMBED} a.h5 --force", "a.h5", 2, "a.h5 | not a virnuc embeddings file | !--force"),
    (
        f"{TRAIN} a.safetensors --force",
        "a.safetensors other.fa=fasta",
        2,
        "a.safetensors | not a virnuc head | !--force",
    ),
    (f"{TRAIN} readme.safetensors", "readme.md other.fa=fasta", 2, "readme.md | was not made by virnuc"),
    (
        "evaluate --viral in.fa --other other.fa --out . --force",
        "evaluation.json other.fa=fasta",
        2,
        "evaluation.json | was not made by virnuc",
    ),
    # Names that are not UTF-8.
    ("predict caf\udce9.fa --out run", "caf\udce9.fa=fasta", 2, r"caf\udce9.fa | not UTF-8"),
    ("predict in.fa --out caf\udce9", "", 2, r"caf\udce9 | not UTF-8"),
    (f"{FRAMES} 500 --out caf\udce9.tsv", "", 2, r"caf\udce9.tsv | not UTF-8"),
    (
        "train --viral in.fa caf\udce9.fa --other other.fa --out a.safetensors",
        "caf\udce9.fa=fasta other.fa=fasta",
        2,
        r"caf\udce9.fa | not UTF-8",
    ),
]


def tree(folder: Path) -> dict[str, object]:
    """Every file, link and folder, with its content."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(("command", "files", "code", "words"), REFUSED)
def test_refused_before_anything_is_written(
    command: str,
    files: str,
    code: int,
    words: str,
    virnuc: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for file in ("in.fa=fasta", "mine", *files.split()):
        name, is_link, target = file.partition("->")
        name, _, content = name.partition("=")
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        if is_link:
            Path(name).symlink_to(target)
        else:
            Path(name).write_text(CONTENT[content])
    before = tree(here)
    first, *others = words.split(" | ")
    error = virnuc.refused(code, first, *command.split())
    assert tree(here) == before
    assert [word for word in others if (word.removeprefix("!") in error) == word.startswith("!")] == []
