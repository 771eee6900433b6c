"""Chunks without a stop-free frame get a DNA-only score, and nothing else changes."""

import shutil
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

from tests.made_models import NO_OPEN_FRAME, WIDTH, MadeModels, MadeRun, make_head, plan_run, write_contigs
from tests.made_moves import begin_move, content, from_nothing, write_results
from virnuc_core.errors import MismatchError
from virnuc_core.inference.launcher import run_lane
from virnuc_core.inference.planning import index_inputs, open_plan
from virnuc_core.inference.runner import Scorer
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.rescore import score_embeddings
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frames import LEAST_BASES


def computed(root: Path, fasta: Path, models: MadeModels, **changes: object) -> MadeRun:
    run = plan_run(root, fasta, models.config(**changes))
    run_lane(run.folder, range(len(run.plan.shards)), "cpu")
    write_results(run)
    return run


@pytest.fixture(scope="module")
def models(made_models: MadeModels) -> MadeModels:
    return made_models


@pytest.fixture(scope="module")
def fasta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contigs(tmp_path_factory.mktemp("input") / "in.fa", 30)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, fasta: Path, models: MadeModels) -> MadeRun:
    return computed(tmp_path_factory.mktemp("without"), fasta, models)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, fasta: Path, models: MadeModels) -> MadeRun:
    return computed(tmp_path_factory.mktemp("with"), fasta, models, dna_head=str(models.dna_head))


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False, dtype={"p_virus": str})


def rows_of(run: MadeRun) -> dict[str, tuple[bytes, ...]]:
    with h5py.File(run.folder.embeddings) as file:
        columns = [file[name][:] for name in ("dna", "protein", "scores")]
        return {
            name: tuple(column[row].tobytes() for column in columns)
            for row, name in enumerate(file["frame_ids"].asstr()[:])
        }


def test_every_chunk_has_a_score_and_those_of_stop_free_frames_are_as_before(
    run: MadeRun, without: MadeRun
) -> None:
    before, now = read(without.folder.predictions), read(run.folder.predictions)
    assert len(run.plan.shards) > 1
    is_closed = before.status == "no_open_frame"
    assert 10 < is_closed.sum() < len(before) - 10
    pd.testing.assert_frame_equal(now[~is_closed], before[~is_closed])
    closed = now[is_closed]
    assert set(closed.status) == {"dna_alone"}
    assert set(closed.best_frame) == {"DNA"}
    assert set(closed.call) <= {"virus", "other"}
    old, new = rows_of(without), rows_of(run)
    assert {name: new[name] for name in old} == old
    added = {f"{row.contig}_chunk_{row.chunk}DNA" for row in closed.itertuples()}
    assert new.keys() - old.keys() == added
    for name in ("prediction_results", "highest_score"):
        now_bytes, bytes_before = (getattr(one.folder, name).read_bytes() for one in (run, without))
        assert now_bytes == bytes_before


def test_the_score_is_the_dna_heads_of_the_vector_of_the_whole_chunk(
    run: MadeRun, models: MadeModels, tmp_path: Path
) -> None:
    closed = read(run.folder.predictions).query("status == 'dna_alone'")
    records = dict(
        zip(run.store.record_names(0, run.store.num_records), range(run.store.num_records), strict=True)
    )
    chunks = [run.store.sequence(records[row.contig])[row.start - 1 : row.end] for row in closed.itertuples()]
    whole = tmp_path / "whole.fa"
    whole.write_bytes(b"".join(b">%d\n%b\n" % (number, bases) for number, bases in enumerate(chunks)))
    alone = plan_run(
        tmp_path / "alone", whole, models.config(chunk_length=None, esm_model=None, head=None), kind="embed"
    )
    alone.compute()
    aggregate(alone.folder, alone.plan, alone.store)
    with h5py.File(alone.folder.embeddings) as file:
        expected = file["embeddings"][:]
    with h5py.File(run.folder.embeddings) as file:
        is_closed = np.char.endswith(file["frame_ids"].asstr()[:].astype(str), "DNA")
        dna, protein, scores = (file[name][:][is_closed] for name in ("dna", "protein", "scores"))
    np.testing.assert_array_equal(dna, expected)
    assert not protein.any()
    np.testing.assert_array_equal(scores, Scorer(models.dna_head, "cpu").score(dna, None))
    np.testing.assert_allclose(closed.p_virus.astype(float), scores[:, 1], atol=5e-7)


def test_every_table_counts_them(run: MadeRun) -> None:
    chunks, contigs = read(run.folder.predictions), read(run.folder.contigs)
    by_contig = Counter(chunks.query("status == 'dna_alone'").contig)
    assert contigs.set_index("contig").dna_alone_chunks.to_dict() == {
        name: by_contig[name] for name in contigs.contig
    }
    assert (contigs.scored_chunks == contigs.chunks).all()
    assert not (contigs.call == "unscored").any()
    assert set(contigs.tier[contigs.dna_alone_chunks == contigs.chunks]) == {"unsure"}
    regions = read(run.folder.regions)
    for region in regions.itertuples():
        inside = chunks.query(
            f"contig == {region.contig!r} and start >= {region.start} and end <= {region.end}"
        )
        assert (inside.status == "dna_alone").sum() == region.dna_alone_chunks
    assert regions.dna_alone_chunks.sum() > 0


def test_an_input_without_any_open_frame(tmp_path: Path, models: MadeModels) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(
        "".join(f">closed{number}\n{NO_OPEN_FRAME[number:]}\n" for number in range(9))
        + f">gap\n{'N' * 500}\n"
    )
    run = computed(tmp_path / "run", fasta, models, dna_head=str(models.dna_head))
    chunks = read(run.folder.predictions)
    has_enough = (chunks.contig != "gap") & (chunks.end - chunks.start + 1 >= LEAST_BASES)
    assert chunks[~has_enough].contig.nunique() > 1, "the gap, and short last chunks"
    assert set(chunks.status[has_enough]) == {"dna_alone"}
    assert set(chunks.status[~has_enough]) == {"no_open_frame"}
    assert run.folder.prediction_results.read_text().count("\n") == 1


def test_a_run_without_it_is_not_continued_with_it(
    without: MadeRun, fasta: Path, models: MadeModels, tmp_path: Path
) -> None:
    folder = RunFolder(shutil.copytree(without.folder.root, tmp_path / "run"))
    config = models.config(dna_head=str(models.dna_head))
    with pytest.raises(MismatchError, match=r"rows \(--dna-head\) were of open_frames, now of all_chunks"):
        index_inputs(folder, [str(fasta)], config.chunk_length, "dna", config.rows)


def test_another_dna_head_or_one_of_another_width_is_refused(
    run: MadeRun, fasta: Path, models: MadeModels, tmp_path: Path
) -> None:
    config = models.config(dna_head=str(make_head(tmp_path / "other.safetensors", WIDTH, seed=5)))
    with pytest.raises(MismatchError, match=r"dna_head \(--dna-head\) was dna_head\.safetensors .* other\."):
        open_plan(config, run.store, "predict", ("cpu",), run.folder)
    with pytest.raises(
        MismatchError, match=r"takes 192 features, but dnabert gives 96\. Give the --dna-head"
    ):
        plan_run(tmp_path / "run", fasta, models.config(dna_head=str(models.head)))


def test_stored_vectors_are_scored_again_with_and_without(
    run: MadeRun, without: MadeRun, models: MadeModels, tmp_path: Path
) -> None:
    out = tmp_path / "scores.tsv"
    assert score_embeddings(run.folder.embeddings, str(models.head), out) == without.store.num_frames
    assert out.read_text().count("DNA\t") == 0
    rows = score_embeddings(run.folder.embeddings, str(models.head), out, str(models.dna_head))
    assert rows == run.store.num_frames
    assert out.read_text().count("DNA\t") == run.store.meta.num_closed


def test_moved_to_another_dna_head_it_is_the_run_from_nothing(
    fasta: Path, models: MadeModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = plan_run(tmp_path / "run", fasta, models.config(dna_head=str(models.dna_head)))
    before.compute()
    write_results(before)
    other = make_head(tmp_path / "other.safetensors", WIDTH, seed=5)
    moved = begin_move(before, models.config(dna_head=str(other)))
    fresh = from_nothing(moved, tmp_path / "fresh")
    caplog.clear()
    with caplog.at_level("INFO"):
        moved.compute()
    assert "loaded" not in caplog.text
    for made in (moved, fresh):
        write_results(made)
    assert content(moved.folder) == content(fresh.folder)
    now, then = rows_of(moved), rows_of(before)
    assert {name for name in now if now[name] != then[name]} == {name for name in now if name.endswith("DNA")}
