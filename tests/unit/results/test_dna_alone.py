"""Chunks without a stop-free frame get a DNA-only score, and nothing else changes."""

from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

from tests.made_models import WIDTH, MadeModels, MadeRun, make_head, plan_run
from tests.made_moves import begin_move, content, from_nothing, write_results
from virnuc_core.errors import MismatchError
from virnuc_core.inference.planning import index_inputs, open_plan
from virnuc_core.inference.runner import Scorer
from virnuc_core.results.rescore import score_embeddings


def computed(root: Path, fasta: Path, models: MadeModels) -> MadeRun:
    run = plan_run(root, fasta, models.config(dna_head=str(models.dna_head)))
    run.compute()
    write_results(run)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, contigs: Path, made_models: MadeModels) -> MadeRun:
    """The same as `finished_run`, with a DNA head."""
    return computed(tmp_path_factory.mktemp("with"), contigs, made_models)


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False, dtype={"p_virus": str})


def rows_of(run: MadeRun) -> dict[str, tuple[np.ndarray, ...]]:
    """DNA vector, protein vector and scores by id."""
    with h5py.File(run.folder.embeddings) as file:
        columns = [file[name][:] for name in ("dna", "protein", "scores")]
        return dict(zip(file["frame_ids"].asstr()[:].tolist(), zip(*columns, strict=True), strict=True))


def changed_rows(before: MadeRun, now: MadeRun) -> set[str]:
    """Ids of new rows and of those with other bytes."""
    old = {name: b"".join(map(np.ndarray.tobytes, row)) for name, row in rows_of(before).items()}
    new = {name: b"".join(map(np.ndarray.tobytes, row)) for name, row in rows_of(now).items()}
    assert old.keys() <= new.keys()
    return {name for name in new if new[name] != old.get(name)}


def test_every_chunk_has_a_score_and_those_of_stop_free_frames_are_as_before(
    run: MadeRun, finished_run: MadeRun, made_models: MadeModels
) -> None:
    before, now = read(finished_run.folder.predictions), read(run.folder.predictions)
    is_closed = before.status == "no_open_frame"
    assert 10 < is_closed.sum() < len(before) - 10
    pd.testing.assert_frame_equal(now[~is_closed], before[~is_closed])
    closed = now[is_closed]
    assert (set(closed.status), set(closed.best_frame)) == ({"dna_alone"}, {"DNA"})
    assert set(closed.call) <= {"virus", "other"}
    names = [f"{row.contig}_chunk_{row.chunk}DNA" for row in closed.itertuples()]
    assert changed_rows(finished_run, run) == set(names)
    for name in ("prediction_results", "highest_score"):
        now_bytes, bytes_before = (getattr(one.folder, name).read_bytes() for one in (run, finished_run))
        assert now_bytes == bytes_before
    rows = rows_of(run)
    dna, protein, scores = (np.stack(column) for column in zip(*(rows[name] for name in names), strict=True))
    assert not protein.any()
    np.testing.assert_array_equal(scores, Scorer(made_models.dna_head, "cpu").score(dna, None))
    np.testing.assert_allclose(closed.p_virus.astype(float), scores[:, 1], atol=5e-7)


def test_every_table_counts_them(run: MadeRun) -> None:
    chunks, contigs = read(run.folder.predictions), read(run.folder.contigs)
    by_contig = Counter(chunks.query("status == 'dna_alone'").contig)
    assert contigs.dna_alone_chunks.tolist() == [by_contig[name] for name in contigs.contig]
    assert (contigs.scored_chunks == contigs.chunks).all()
    assert set(contigs.tier[contigs.dna_alone_chunks == contigs.chunks]) == {"unsure"}
    assert read(run.folder.regions).dna_alone_chunks.sum() > 0


def test_another_dna_head_or_one_of_another_width_is_refused(
    run: MadeRun, finished_run: MadeRun, contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    config = made_models.config(dna_head=str(make_head(tmp_path / "other.safetensors", WIDTH, seed=5)))
    with pytest.raises(MismatchError, match=r"rows \(--dna-head\) were of open_frames, now of all_chunks"):
        index_inputs(finished_run.folder, [str(contigs)], config.chunk_length, "dna", config.rows)
    with pytest.raises(MismatchError, match=r"dna_head \(--dna-head\) was dna_head\.safetensors .* other\."):
        open_plan(config, run.store, "predict", ("cpu",), run.folder)
    with pytest.raises(
        MismatchError, match=r"takes 192 features, but dnabert gives 96\. Give the --dna-head"
    ):
        plan_run(tmp_path / "run", contigs, made_models.config(dna_head=str(made_models.head)))


def test_stored_vectors_are_scored_again_with_and_without(
    run: MadeRun, finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    out = tmp_path / "scores.tsv"
    for dna_head, of_run in ((None, finished_run), (str(made_models.dna_head), run)):
        rows = score_embeddings(run.folder.embeddings, str(made_models.head), out, dna_head)
        assert rows == of_run.store.num_frames
        assert out.read_text().count("DNA\t") == of_run.store.meta.num_closed


def test_moved_to_another_dna_head_it_is_the_run_from_nothing(
    contigs: Path, made_models: MadeModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = computed(tmp_path / "run", contigs, made_models)
    other = make_head(tmp_path / "other.safetensors", WIDTH, seed=5)
    moved = begin_move(before, made_models.config(dna_head=str(other)))
    fresh = from_nothing(moved, tmp_path / "fresh")
    caplog.clear()
    with caplog.at_level("INFO"):
        moved.compute()
    assert "loaded" not in caplog.text
    for made in (moved, fresh):
        write_results(made)
    assert content(moved.folder) == content(fresh.folder)
    assert changed_rows(before, moved) == {name for name in rows_of(moved) if name.endswith("DNA")}
