"""Embeddings as a person opens them."""

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.errors import DamagedFileError, InputError, UsageError
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings


@pytest.fixture
def opened(finished_run: MadeRun) -> Iterator[Embeddings]:
    with Embeddings(finished_run.folder.embeddings) as embeddings:
        yield embeddings


def test_ids_and_vectors_are_those_of_the_file(opened: Embeddings, finished_run: MadeRun) -> None:
    with h5py.File(finished_run.folder.embeddings) as file:
        dna, protein = file["dna"][:], file["protein"][:]
        assert opened.ids == file["frame_ids"].asstr()[:].tolist()
        assert opened.scores is not None
        assert np.array_equal(opened.scores, file["scores"][:])
    assert opened.datasets == ("dna", "protein")
    assert opened.vectors.shape == (len(opened), 192)
    assert np.array_equal(np.asarray(opened.vectors), np.hstack([dna, protein]))
    assert np.array_equal(opened.matrix("protein")[:], protein)


def test_rows_are_chosen_as_in_numpy(opened: Embeddings) -> None:
    rows, whole = opened.vectors, np.asarray(opened.vectors)
    count = len(rows)
    mask = np.arange(count) % 3 == 1
    for key in (0, -1, slice(2, 5), slice(None, None, -4), slice(7, 3), [3, 1, 3], [-1], mask):
        assert np.array_equal(rows[key], whole[key])
    assert rows[[]].shape == (0, 192)
    for wrong in (count, [count], mask[1:], [0.5], [[1]]):
        with pytest.raises(IndexError):
            rows[wrong]  # type: ignore[index]


def test_table_names_contig_chunk_and_frame(opened: Embeddings, finished_run: MadeRun) -> None:
    table = opened.as_dataframe(vectors=True)
    store = finished_run.store
    assert table.index.tolist() == store.frame_ids(0, store.num_frames)
    rebuilt = table["contig"] + "_chunk_" + table["chunk"].astype(str) + table["frame"]
    assert rebuilt.tolist() == table.index.tolist()
    assert table["p_virus"].between(0, 1).all()
    assert table.columns[5:7].tolist() == ["dna_0", "dna_1"]
    assert table["protein_95"].iloc[4] == opened.matrix("protein")[4][95]


def test_a_file_without_vectors_still_has_scores(
    tmp_path: Path, contigs: Path, made_models: MadeModels
) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(embeddings="none"))
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    with Embeddings(run.folder.embeddings) as opened:
        assert len(opened.as_dataframe()) == run.store.num_frames
        with pytest.raises(UsageError, match="only scores"):
            _ = opened.vectors


def test_what_is_no_embeddings_file_is_refused(finished_run: MadeRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        Embeddings(tmp_path / "none.h5")
    with pytest.raises(DamagedFileError, match="is a shard"):
        Embeddings(finished_run.folder.shard(0))


def test_a_model_that_is_not_there_is_refused(opened: Embeddings) -> None:
    with pytest.raises(UsageError, match="only dna and protein"):
        opened.matrix("embeddings")
