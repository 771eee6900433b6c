"""The frame store of a run is kept for the same files and settings, and never replaced under a run."""

from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.errors import InputError, MismatchError
from virnuc_core.inference.planning import index_inputs
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "in.fa"
    path.write_text(f">long\n{'ATG' * 100}\n>border\n{'ATG' * 50}\n>short\n{'ATG' * 49}AT\n>none\n\n")
    return path


def index(folder: RunFolder, fasta: Path, min_length: int) -> StoreMeta:
    return index_inputs(folder, [str(fasta)], 60, "dna", min_length=min_length)


def rejected(folder: RunFolder) -> list[list[str]]:
    return [line.split("\t") for line in folder.rejected.read_text().splitlines()[1:]]


def test_short_records_are_rejected_with_their_reason(fasta: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    meta = index(folder, fasta, 150)
    assert (meta.num_records, meta.num_rejected, meta.min_length) == (2, 2, 150)
    assert [(row[1], row[3], row[4]) for row in rejected(folder)] == [
        ("short", "149", "shorter than 150 (--min-length)"),
        ("none", "0", "empty sequence"),
    ]
    assert (index(folder, fasta, 0).num_records, StoreMeta.read(folder.frames).min_length) == (3, 0)
    with pytest.raises(InputError, match=r"none of the 4 records .* or a smaller --min-length"):
        index(folder, fasta, 301)


def test_a_run_is_not_continued_with_another_least_length(
    fasta: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    run: MadeRun = plan_run(tmp_path / "run", fasta, made_models.config())
    before = StoreMeta.read(run.folder.frames)
    with pytest.raises(MismatchError, match=r"min_length \(--min-length\) was 0, now 150"):
        index(run.folder, fasta, 150)
    assert StoreMeta.read(run.folder.frames) == before
    assert index(run.folder, fasta, 0) == before
