"""Difficult inputs behave as in docs/hard-inputs.md, in 500-bp chunks; its table lists exactly these files."""

from pathlib import Path

import pytest

from tests.made_inputs import HardInput, hard_inputs
from tests.slow_frames import slow_chunks, slow_frames
from virnuc_cli.main import main
from virnuc_core.sequences.frame_store import write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store

PAGE = Path(__file__).parents[3] / "docs" / "hard-inputs.md"
INPUTS = {made.name: made for made in hard_inputs()}


def frames_of(made: HardInput) -> list[str]:
    """Rows of the frames table, by the slow oracle."""
    return [
        f"{name}_chunk_{index}{frame}\t{dna}\t{protein}"
        for name, sequence in made.records
        for index, (start, end) in enumerate(slow_chunks(len(sequence), 500), 1)
        for frame, _, dna, protein in slow_frames(sequence[start:end])
    ]


def table_row(made: HardInput) -> list[str]:
    """The page's cells after the description."""
    if made.error is not None:
        return [f"error: {made.error}", "", "", "", ""]
    chunks = sum(len(slow_chunks(len(sequence), 500)) for _, sequence in made.records)
    numbers = (len(made.records), chunks, len(frames_of(made)), made.num_rejected, made.num_renamed)
    return [str(number) for number in numbers]


def test_the_page_lists_every_made_input() -> None:
    table = PAGE.read_text().partition("## The test set")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "| `" in line]
    assert {row[0].strip("`"): row[2:] for row in rows} == {n: table_row(made) for n, made in INPUTS.items()}


@pytest.mark.parametrize("name", [name for name, made in INPUTS.items() if made.error is None])
def test_every_record_is_used_or_rejected(tmp_path: Path, name: str) -> None:
    made, path = INPUTS[name], tmp_path / name
    path.write_bytes(made.content)
    store = build_frame_store([path], tmp_path / "frames", 500)
    assert store.sequences is not None
    names = store.record_names(0, store.num_records)
    assert tuple(zip(names, store.sequences.to_strings(), strict=True)) == made.records
    assert (store.meta.num_rejected, store.meta.num_renamed) == (made.num_rejected, made.num_renamed)
    write_frames_tsv(store, tmp_path / "frames.tsv")
    assert (tmp_path / "frames.tsv").read_text().splitlines()[1:] == frames_of(made)


@pytest.mark.parametrize("name", [name for name, made in INPUTS.items() if made.error is not None])
def test_what_cannot_be_used_is_one_clear_error(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made, path, out = INPUTS[name], tmp_path / name, tmp_path / "frames.tsv"
    path.write_bytes(made.content)
    assert main(["frames", str(path), "--chunk-length", "500", "--out", str(out)]) == 3
    *warnings, error = capsys.readouterr().err.splitlines()
    assert all(line.startswith("virnuc: warning: ") for line in warnings)
    assert error.startswith("virnuc: error: ")
    assert str(made.error) in error
    assert name in error
    assert not out.exists()
