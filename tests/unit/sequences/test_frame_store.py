from pathlib import Path

import numpy as np
import pytest

from virnuc_core.columns import ByteColumn
from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.sequences.frame_store import FrameStore, write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.store_meta import SCHEMA_VERSION, StoreMeta
from virnuc_core.sequences.translation import DNA_ALONE

SEQUENCES = {"long": "GCC" * 300, "none": "TTAATTAACTAGCTAG" * 5, "short": "GCCGCCA"}


@pytest.fixture
def store(tmp_path: Path) -> FrameStore:
    path = tmp_path / "input.fa"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in SEQUENCES.items()))
    return build_frame_store([path], tmp_path / "frames", 500)


def test_ids_of_any_range(store: FrameStore) -> None:
    assert store.record_names(0, 3) == list(SEQUENCES)
    chunks = ["long_chunk_1", "long_chunk_2", "none_chunk_1", "short_chunk_1"]
    assert store.chunk_ids(0, store.num_chunks) == chunks
    frames = store.frame_ids(0, store.num_frames)
    assert frames[0] == "long_chunk_1F1"
    assert frames[-1] == "short_chunk_1R3"
    for begin in range(store.num_frames + 1):
        for end in range(begin, store.num_frames + 1):
            assert store.frame_ids(begin, end) == frames[begin:end]
    for begin in range(5):
        assert store.chunk_ids(begin, 4) == chunks[begin:]


def test_a_chunk_without_an_open_frame_has_a_row_as_chunk_only(store: FrameStore) -> None:
    assert 2 not in store.frame_chunk
    assert store.chunk_record.tolist() == [0, 0, 1, 2]


def test_a_chunk_without_an_open_frame_may_have_a_row_of_its_dna(store: FrameStore, tmp_path: Path) -> None:
    every = build_frame_store([tmp_path / "input.fa"], tmp_path / "all", 500, rows="all_chunks")
    closed = build_frame_store([tmp_path / "input.fa"], tmp_path / "closed", 500, rows="closed_chunks")
    ids = every.frame_ids(0, every.num_frames)
    row = ids.index("none_chunk_1DNA")
    assert [*ids[:row], *ids[row + 1 :]] == store.frame_ids(0, store.num_frames)
    assert row == int(np.searchsorted(every.frame_chunk, 2))
    assert closed.frame_ids(0, closed.num_frames) == ["none_chunk_1DNA"]
    for made, place in ((every, row), (closed, 0)):
        assert made.dna is not None
        assert made.protein is not None
        assert made.dna.rows(place, place + 1).to_strings() == [SEQUENCES["none"]]
        assert made.protein.rows(place, place + 1).to_strings() == [""]
        assert made.frame_number[place] == DNA_ALONE
        assert made.meta.num_closed == 1
    others = np.delete(np.arange(every.num_frames), row)
    for name in ("dna", "protein"):
        kept = getattr(every, name).take(others)
        assert kept.to_strings() == getattr(store, name).rows(0, store.num_frames).to_strings()


def test_rows_are_found_without_reading_the_others(store: FrameStore) -> None:
    assert store.dna is not None
    assert store.protein is not None
    for row in range(store.num_frames):
        chunk = store.frame_chunk[row]
        record = store.chunk_record[chunk]
        strand = list(SEQUENCES.values())[record][store.chunk_start[chunk] : store.chunk_end[chunk]]
        if store.frame_number[row] >= 3:
            strand = strand[::-1].translate(str.maketrans("ACGT", "TGCA"))
        frame = store.frame_number[row] % 3
        dna = store.dna.rows(row, row + 1).to_strings()[0]
        assert strand[frame:].startswith(dna)
        assert len(store.protein.rows(row, row + 1).to_strings()[0]) == len(dna) // 3


def test_every_record_is_there_as_a_whole(store: FrameStore) -> None:
    assert [store.sequence(row).decode() for row in range(3)] == list(SEQUENCES.values())


def test_whole_sequences_are_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "input.fa"
    path.write_text(">a\nACGU\n>b\nNNTT\n")
    store = build_frame_store([path], tmp_path / "frames", None)
    assert [store.sequence(row) for row in range(2)] == [b"ACGT", b"NNTT"]
    assert store.sequences is None


def test_order_by_length_is_longest_first_and_stable() -> None:
    column = ByteColumn.from_strings(["xxxx", "a", "bbb", "c", "ddd"])
    assert FrameStore.order_by_length(column, 1, 5).tolist() == [2, 4, 1, 3]
    assert FrameStore.order_by_length(column, 2, 2).tolist() == []


def test_columns_cannot_be_written_to(store: FrameStore) -> None:
    assert isinstance(store.frame_chunk, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        store.frame_chunk[0] = 1


def test_opened_again_it_is_the_same(store: FrameStore) -> None:
    again = FrameStore.open(store.folder)
    assert again.meta == store.meta
    assert again.frame_ids(0, again.num_frames) == store.frame_ids(0, store.num_frames)


def test_a_folder_without_meta_is_not_a_store(store: FrameStore) -> None:
    (store.folder / "meta.json").unlink()
    with pytest.raises(DamagedFileError, match="not a whole frame store"):
        FrameStore.open(store.folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"inputs": [{}]}', '{"inputs": 3}'])
def test_meta_of_another_shape_is_damage(store: FrameStore, text: str) -> None:
    (store.folder / "meta.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"meta\.json cannot be used"):
        FrameStore.open(store.folder)


def test_another_schema_version_is_refused(store: FrameStore) -> None:
    path = store.folder / "meta.json"
    path.write_text(path.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'))
    with pytest.raises(DamagedFileError, match="version 99"):
        StoreMeta.read(store.folder)


def test_a_cut_column_is_damage(store: FrameStore) -> None:
    path = store.folder / "dna.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"dna\.bin"):
        FrameStore.open(store.folder)


def test_the_table_of_whole_sequences_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "input.fa"
    path.write_text(">a\nACGT\n")
    store = build_frame_store([path], tmp_path / "frames", None)
    with pytest.raises(UsageError, match="whole sequences"):
        write_frames_tsv(store, tmp_path / "frames.tsv")


def test_equal_tables_are_equal_files(store: FrameStore, tmp_path: Path) -> None:
    for name in ("a.tsv.gz", "b.tsv.gz"):
        write_frames_tsv(store, tmp_path / name)
    assert (tmp_path / "a.tsv.gz").read_bytes() == (tmp_path / "b.tsv.gz").read_bytes()
