"""A run that reuses another is byte-identical to a new run, and computes only what it must."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.made_models import WIDTH, MadeModels, MadeRun, make_esm2, make_head, plan_run, write_contigs
from tests.made_moves import begin_move, content, copy_of, from_nothing, write_results
from virnuc_core.errors import MismatchError
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.reuse import ReusedShards
from virnuc_core.inference.shard import ShardResult, read_shard, shard_identity
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig


@pytest.fixture(scope="module")
def finished(made_models: MadeModels, tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    folder = tmp_path_factory.mktemp("finished")
    contigs = write_contigs(folder / "in.fa", 16)
    made = plan_run(folder / "run", contigs, made_models.config(), shard_seconds=0.02)
    made.compute()
    return made


@pytest.fixture
def run(finished: MadeRun, tmp_path: Path) -> MadeRun:
    return copy_of(finished, tmp_path / "run")


def results(run: MadeRun) -> list[ShardResult]:
    return [read_shard(run.folder.shard(s.index), shard_identity(run.plan, s)) for s in run.plan.shards]


@contextmanager
def unloadable_dna_model(models: MadeModels) -> Iterator[None]:
    weights = models.dnabert / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\0\0\0\0")
    yield
    weights.write_bytes(whole)


SETTINGS: dict[str, dict[str, object]] = {
    "rounded": {"embeddings": "float16"},
    "not stored": {"embeddings": "none"},
    "one by one": {"engine": "reference", "dnabert_engine": "packed"},
}


def settings_of(move: str, models: MadeModels, folder: Path) -> RunConfig:
    if move == "other head":
        return models.config(head=str(make_head(folder / "other_head.safetensors", 2 * WIDTH, seed=7)))
    if move == "larger ESM-2":
        head = make_head(folder / "wide_head.safetensors", WIDTH + 64, seed=3)
        return models.config(esm_model=str(make_esm2(folder / "esm2_large", width=64)), head=str(head))
    return models.config(**SETTINGS[move])


@pytest.mark.parametrize("move", ["larger ESM-2", *SETTINGS])
def test_it_is_the_run_from_nothing(move: str, made_models: MadeModels, run: MadeRun, tmp_path: Path) -> None:
    moved = begin_move(run, settings_of(move, made_models, tmp_path))
    assert [(s.begin, s.end) for s in moved.plan.shards] == [(s.begin, s.end) for s in run.plan.shards]
    reused = ReusedShards.open(moved.folder, moved.plan)
    assert reused is not None
    is_other_esm2 = move in ("larger ESM-2", "one by one")
    assert reused.families == ({"dnabert_s"} if is_other_esm2 else {"dnabert_s", "esm2"})
    fresh = from_nothing(moved, tmp_path / "fresh")
    with unloadable_dna_model(made_models):
        moved.compute()
    for made in (moved, fresh):
        write_results(made)
    assert content(moved.folder) == content(fresh.folder)
    for before, now, expected in zip(results(run), results(moved), results(fresh), strict=True):
        np.testing.assert_array_equal(now.scores, expected.scores)
        assert now.counters == expected.counters
        if now.dna is not None and now.dna.dtype == np.float32:
            np.testing.assert_array_equal(now.dna, before.dna)
            np.testing.assert_array_equal(now.protein, expected.protein)


def test_the_plan_is_that_of_a_run_from_nothing(
    made_models: MadeModels, run: MadeRun, tmp_path: Path
) -> None:
    config = settings_of("larger ESM-2", made_models, tmp_path)
    moved = begin_move(run, config)
    fresh = plan_run(tmp_path / "fresh", write_contigs(tmp_path / "in.fa", 16), config)
    assert moved.plan == replace(fresh.plan, shards=moved.plan.shards)
    older = ReusedShards(run.folder, replace(run.plan, virnuc_version="0.0"), moved.plan)
    assert older.families == set()
    costs = [sum(shard.cost for shard in plan.shards) for plan in (moved.plan, fresh.plan)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def test_a_damaged_old_shard_is_computed(
    made_models: MadeModels, run: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moved = begin_move(run, settings_of("other head", made_models, tmp_path))
    fresh = from_nothing(moved, tmp_path / "fresh")
    shard = run.folder.shard(1)
    shard.write_bytes(shard.read_bytes()[:-9])
    run.folder.shard(2).unlink()
    with unloadable_dna_model(made_models), pytest.raises(MismatchError, match="model dnabert"):
        moved.compute()
    assert moved.folder.shard(0).exists()
    with caplog.at_level(logging.WARNING):
        moved.compute()
    assert "nothing can be kept of shard 1" in caplog.text
    assert "nothing can be kept of shard 2" in caplog.text
    assert content(moved.folder) == content(fresh.folder)


def test_a_run_from_nothing_keeps_nothing(finished: MadeRun) -> None:
    assert ReusedShards.open(finished.folder, finished.plan) is None
    assert finished.folder.previous is RunFolder(finished.folder.root / "next").previous is None
    assert read_plan(finished.folder.plan) == finished.plan
