"""What docs/hard-inputs.md says of each difficult file, at 500 bp."""

from pathlib import Path

import pytest

from virnuc_core.errors import InputError
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store

# file: used records, chunks, open frames, rejected records, renamed records
COUNTS = {
    "lower_case.fa": (2, 33, 21, 0, 0),
    "iupac.fa": (2, 8, 4, 0, 0),
    "n_runs.fa": (3, 11, 7, 0, 0),
    "windows_crlf.fa": (2, 8, 6, 0, 0),
    "uneven_wrap.fa": (2, 8, 5, 0, 0),
    "empty_records.fa": (2, 4, 1, 3, 0),
    "duplicate_ids.fa": (4, 8, 6, 0, 2),
    "rna_u.fa": (2, 10, 6, 0, 0),
    "short_and_border.fa": (20, 30, 17, 0, 0),
    "no_final_newline.fa": (1, 2, 1, 0, 0),
    "fastq_given.fq": (10, 10, 29, 0, 0),
    "plain.fa.gz": (2, 33, 21, 0, 0),
    "real_orchids_iupac.fasta": (94, 188, 2, 0, 0),
    "real_short_25bp.fasta": (3, 3, 16, 0, 0),
}
ERRORS = {
    "protein_as_dna.fa": "none of the 5 records can be used; the first one: not DNA",
    "empty_file.fa": "no sequence record found",
    "not_fasta.txt": "neither FASTA nor FASTQ",
    "truncated.fa.gz": "truncated",
}


@pytest.fixture
def hard(shared_dir: Path) -> Path:
    return shared_dir / "data" / "hard"


def content(store: FrameStore, begin: int, end: int) -> list[tuple[str, str]]:
    """(nucleotide, protein) of the frames of the records begin..end-1, without names."""
    assert store.dna is not None
    assert store.protein is not None
    records = store.chunk_record[store.frame_chunk]
    rows = zip(store.dna.to_strings(), store.protein.to_strings(), strict=True)
    return [row for row, record in zip(rows, records, strict=True) if begin <= record < end]


def test_every_file_is_described(hard: Path) -> None:
    assert {path.name for path in hard.iterdir()} - {"NOTES.tsv"} == COUNTS.keys() | ERRORS.keys()


@pytest.mark.parametrize("name", COUNTS)
def test_every_record_is_used_or_rejected(hard: Path, tmp_path: Path, name: str) -> None:
    meta = build_frame_store([hard / name], tmp_path / "frames", 500).meta
    found = (meta.num_records, meta.num_chunks, meta.num_frames, meta.num_rejected, meta.num_renamed)
    assert found == COUNTS[name]
    assert len((tmp_path / "frames" / "rejected.tsv").read_text().splitlines()) == 1 + meta.num_rejected


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_used_is_one_clear_error(hard: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=ERRORS[name]) as caught:
        build_frame_store([hard / name], tmp_path / "frames", 500)
    assert name in str(caught.value)
    assert not (tmp_path / "frames").exists()


def test_case_is_of_no_account(hard: Path, tmp_path: Path) -> None:
    text = (hard / "lower_case.fa").read_text()
    upper = tmp_path / "upper.fa"
    upper.write_text("".join(line if line[0] == ">" else line.upper() for line in text.splitlines(True)))
    stores = [build_frame_store([path], tmp_path / "frames", 500) for path in (upper, hard / "plain.fa.gz")]
    lower = build_frame_store([hard / "lower_case.fa"], tmp_path / "lower", 500)
    for store in stores:
        assert store.meta.content_sha256 == lower.meta.content_sha256


def test_rna_is_read_as_the_dna_beside_it(hard: Path, tmp_path: Path) -> None:
    store = build_frame_store([hard / "rna_u.fa"], tmp_path / "frames", 500)
    assert content(store, 0, 1) == content(store, 1, 2) != []


def test_protein_input_takes_proteins(hard: Path, tmp_path: Path) -> None:
    store = build_frame_store([hard / "protein_as_dna.fa"], tmp_path / "frames", None, "protein")
    assert (store.num_frames, store.meta.num_rejected) == (5, 0)
