"""One device's work on a shard, against models run by hand on one sequence at a time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.made_models import MadeModels, MadeRun, make_head, make_models, plan_run, write_contigs
from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.inference.engine import Embedder
from virnuc_core.inference.planning import make_plan
from virnuc_core.run_plan import Shard
from virnuc_core.shard_file import ShardResult


def run_all(run: MadeRun, **changes: object) -> ShardResult:
    """All rows of a run as one shard."""
    rows = run.store.num_frames
    plan = replace(run.plan, shards=(Shard(index=0, begin=0, end=rows, cost=1.0),), **changes)
    result, seconds = Embedder.load(plan, "cpu").run(run.store, plan.shards[0])
    assert seconds.forward > 0
    return result


def assert_close(left: ShardResult, right: ShardResult, tolerance: float) -> None:
    for name in ("dna", "protein", "scores"):
        a, b = getattr(left, name), getattr(right, name)
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


def test_packed_is_the_reference(finished_run: MadeRun, made_models: MadeModels) -> None:
    packed = run_all(finished_run)
    config = made_models.config(engine="reference")
    plan = make_plan(config, finished_run.store, "predict", ("cpu",))
    reference, _ = Embedder.load(plan, "cpu").run(
        finished_run.store, Shard(index=0, begin=0, end=finished_run.store.num_frames, cost=1.0)
    )
    assert_close(packed, reference, 1e-5)
    assert [model.batches for model in reference.counters.models] == [finished_run.store.num_frames] * 2
    assert [model.packing_efficiency for model in reference.counters.models] == [1.0, 1.0]


def test_rows_are_in_row_order_whatever_the_shards(finished_run: MadeRun) -> None:
    whole = run_all(finished_run)
    embedder = Embedder.load(finished_run.plan, "cpu")
    parts = [embedder.run(finished_run.store, shard)[0] for shard in finished_run.plan.shards]
    for name in ("dna", "protein", "scores"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_allclose(joined, getattr(whole, name), atol=1e-5, rtol=0)


def test_the_work_is_counted(finished_run: MadeRun) -> None:
    counters = run_all(finished_run).counters
    store = finished_run.store
    assert store.protein is not None
    assert store.dna is not None
    assert counters.frames == store.num_frames
    assert counters.residues == store.protein.lengths.sum()
    assert counters.bases == store.dna.lengths.sum()
    dnabert, esm2 = counters.models
    assert (dnabert.family, esm2.family) == ("dnabert_s", "esm2")
    assert esm2.tokens == counters.residues + 2 * counters.frames
    assert 0 < esm2.packing_efficiency <= 1


def test_scores_are_probabilities_of_both_classes(finished_run: MadeRun) -> None:
    scores = run_all(finished_run).scores
    assert scores is not None
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-6)
    assert 0 < (scores[:, 1] > 0.5).mean() < 1


def test_what_is_stored(finished_run: MadeRun) -> None:
    assert run_all(finished_run).dna.dtype == np.float32
    half = run_all(finished_run, embeddings="float16")
    assert (half.dna.dtype, half.protein.dtype, half.scores.dtype) == (np.float16, np.float16, np.float32)
    nothing = run_all(finished_run, embeddings="none")
    assert nothing.dna is None
    assert nothing.protein is None
    np.testing.assert_array_equal(nothing.scores, half.scores)


def test_one_model_alone(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    config = made_models.config(esm_model=None, head=None, chunk_length=None)
    run = plan_run(tmp_path, contigs, config, kind="embed")
    result = run_all(run)
    assert result.protein is None
    assert result.scores is None
    assert result.dna.shape == (40, 96)
    assert result.counters.residues == 0


@pytest.fixture
def own_run(tmp_path: Path) -> tuple[MadeModels, MadeRun]:
    """Models that a test may change after the run on them was planned."""
    models = make_models(tmp_path)
    return models, plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())


def test_changed_weights_are_noticed(own_run: tuple[MadeModels, MadeRun]) -> None:
    models, run = own_run
    weights = models.dnabert / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 1e-4 for name, tensor in tensors.items()}, weights)
    with pytest.raises(MismatchError, match=r"model dnabert .* changed since the run was planned"):
        Embedder.load(run.plan, "cpu")


def test_a_changed_head_is_noticed(own_run: tuple[MadeModels, MadeRun]) -> None:
    models, run = own_run
    make_head(models.head, 192, seed=5)
    with pytest.raises(MismatchError, match=r"head head\.safetensors .* has changed"):
        Embedder.load(run.plan, "cpu")


def test_a_model_that_gives_nan_is_an_error_not_a_score(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    weights = models.dnabert / "model.safetensors"
    tensors = load_file(weights)
    tensors["encoder.layer.1.mlp.wo.bias"][0] = torch.nan
    save_file(tensors, weights)
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())
    with pytest.raises(CheckpointError, match=r"dnabert gives vectors that are not finite .*_chunk_1[FR]\d"):
        run.compute([0])
    assert not run.folder.shard(0).exists()
