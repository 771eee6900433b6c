"""Difficult inputs behave as in docs/hard-inputs.md, in 500-bp chunks; its table lists exactly these files."""

from pathlib import Path

import pytest

from tests.made_inputs import HardInput, fasta, hard_inputs
from tests.slow_frames import slow_chunks, slow_frames
from virnuc_cli.main import main
from virnuc_core.errors import InputError
from virnuc_core.sequences.frame_store_build import build_frame_store

PAGE = Path(__file__).parents[3] / "docs" / "hard-inputs.md"
INPUTS = hard_inputs()
USED = [made for made in INPUTS if made.error is None]
REFUSED = [made for made in INPUTS if made.error is not None]


def written(folder: Path, made: HardInput) -> Path:
    path = folder / made.name
    path.write_bytes(made.content)
    return path


def frames_of(made: HardInput, k: int) -> list[str]:
    """Rows of the frames table, by the slow oracle."""
    return [
        f"{name}_chunk_{index}{frame}\t{dna}\t{protein}"
        for name, sequence in made.records
        for index, (start, end) in enumerate(slow_chunks(len(sequence), k), 1)
        for frame, dna, protein in slow_frames(sequence[start:end])
    ]


def table_row(made: HardInput) -> list[str]:
    """The page's cells after the description."""
    if made.error is not None:
        return [f"error: {made.error}", "", "", "", ""]
    chunks = sum(len(slow_chunks(len(sequence), 500)) for _, sequence in made.records)
    numbers = (len(made.records), chunks, len(frames_of(made, 500)), made.num_rejected, made.num_renamed)
    return [str(number) for number in numbers]


def test_the_page_lists_every_made_input() -> None:
    table = PAGE.read_text().partition("## The test set")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "| `" in line]
    assert {row[0].strip("`"): row[2:] for row in rows} == {made.name: table_row(made) for made in INPUTS}


@pytest.mark.parametrize("made", USED, ids=lambda made: made.name)
def test_every_record_is_used_or_rejected(tmp_path: Path, made: HardInput) -> None:
    store = build_frame_store([written(tmp_path, made)], tmp_path / "frames", 500)
    assert store.sequences is not None
    names = store.record_names(0, store.num_records)
    assert tuple(zip(names, store.sequences.to_strings(), strict=True)) == made.records
    assert (store.meta.num_rejected, store.meta.num_renamed) == (made.num_rejected, made.num_renamed)
    assert len(store.rejected_path.read_text().splitlines()) == 1 + made.num_rejected


@pytest.mark.parametrize("k", [300, 500])
@pytest.mark.parametrize("made", USED, ids=lambda made: made.name)
def test_the_command_writes_the_frames_of_the_used_records(tmp_path: Path, made: HardInput, k: int) -> None:
    path, out = written(tmp_path, made), tmp_path / "frames.tsv"
    assert main(["frames", str(path), "--chunk-length", str(k), "--out", str(out)]) == 0
    assert out.read_text().splitlines()[1:] == frames_of(made, k)


@pytest.mark.parametrize("made", REFUSED, ids=lambda made: made.name)
def test_what_cannot_be_used_is_one_clear_error(
    tmp_path: Path, made: HardInput, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(tmp_path, made), tmp_path / "frames.tsv"
    assert (
        main(["frames", str(path), "--chunk-length", "500", "--out", str(out)]) == InputError.exit_code == 3
    )
    *warnings, error = capsys.readouterr().err.splitlines()
    assert all(line.startswith("virnuc: warning: ") for line in warnings)
    assert error.startswith("virnuc: error: ")
    assert made.error is not None
    assert made.error in error
    assert made.name in error
    assert not out.exists()


def test_protein_input_takes_proteins(tmp_path: Path) -> None:
    made = next(made for made in REFUSED if made.name == "proteins.fa")
    store = build_frame_store([written(tmp_path, made)], tmp_path / "frames", None, "protein")
    assert (store.num_frames, store.meta.num_rejected) == (3, 0)
    assert store.protein is not None
    records = zip(store.record_names(0, 3), store.protein.to_strings(), strict=True)
    assert fasta(list(records)) == made.content
