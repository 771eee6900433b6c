"""A run that stopped goes on with what it was planned with, or not at all; every row is compared by its name."""

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.made_models import (
    WIDTH,
    MadeModels,
    MadeRun,
    make_esm2,
    make_head,
    make_models,
    plan_run,
    write_contigs,
)
from virnuc_core.errors import MismatchError
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import pending_shards
from virnuc_core.results.aggregate import aggregate
from virnuc_core.settings import RunConfig

Row = Mapping[str, tuple[float, ...]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> MadeModels:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def contigs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contigs(tmp_path_factory.mktemp("contigs") / "in.fa", 16)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, models: MadeModels) -> dict[str, RunConfig]:
    """The settings of a run on a larger ESM-2, as 3B is to 650M, and others to go on with by mistake."""
    folder = tmp_path_factory.mktemp("others")
    large = str(make_esm2(folder / "3B", num_layers=4, width=2 * WIDTH))
    wide = {"head": str(make_head(folder / "wide.safetensors", 3 * WIDTH))}
    other_wide = {"head": str(make_head(folder / "other_wide.safetensors", 3 * WIDTH, seed=9))}
    same_shape = str(make_esm2(folder / "3B_again", num_layers=4, width=2 * WIDTH, seed=9))
    return {
        "as planned": models.config(esm_model=large, **wide),
        "smaller model": models.config(esm_model=str(make_esm2(folder / "650M", num_layers=3))),
        "other weights": models.config(esm_model=same_shape, **wide),
        "other head": models.config(esm_model=large, **other_wide),
        "other chunks": models.config(esm_model=large, chunk_length=90, **wide),
    }


@pytest.fixture(scope="module")
def make_run(contigs: Path, configs: dict[str, RunConfig]) -> Callable[[str, Path], MadeRun]:
    return lambda what, root: plan_run(root, contigs, configs[what], shard_seconds=0.05)


@pytest.fixture(scope="module")
def whole(
    make_run: Callable[[str, Path], MadeRun], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Row]]:
    """The rows of undisturbed runs."""
    rows = {}
    for what in ("as planned", "smaller model", "other weights", "other head", "other chunks"):
        run = make_run(what, tmp_path_factory.mktemp("whole") / "run")
        run.compute()
        rows[what] = rows_of(run)
    return rows


def rows_of(run: MadeRun) -> dict[str, Row]:
    """Vectors and scores of each frame, by its name."""
    aggregate(run.folder, run.plan, run.store)
    with h5py.File(run.folder.embeddings) as file:
        columns = {name: file[name][()] for name in ("dna", "protein", "scores")}
        names = file["frame_ids"].asstr()[()].tolist()
    assert len(set(names)) == len(names)
    return {
        name: {column: tuple(values[row].tolist()) for column, values in columns.items()}
        for row, name in enumerate(names)
    }


MISTAKES = {
    "smaller model": r"esm2 model was 3B \(\w{12}\), now 650M \(\w{12}\)",
    "other weights": r"esm2 model was 3B \(\w{12}\), now 3B_again \(\w{12}\)",
    "other head": r"head \(--head\) was wide\.safetensors \(\w{12}\), now other_wide\.safetensors \(\w{12}\)",
    "other chunks": r"chunk_length \(--chunk-length\) was 60, now 90",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_run_refuses_what_it_was_not_planned_with_and_goes_on_unchanged(
    mistake: str,
    make_run: Callable[[str, Path], MadeRun],
    configs: dict[str, RunConfig],
    whole: dict[str, dict[str, Row]],
    tmp_path: Path,
) -> None:
    run = make_run("as planned", tmp_path / "run")
    run.compute([0])
    other = make_run(mistake, tmp_path / "other")
    with pytest.raises(MismatchError, match=MISTAKES[mistake]) as caught:
        open_plan(configs[mistake], other.store, "predict", ("cpu",), run.folder)
    for words in ("plan.json", "old setting", "--force", "virnuc reprocess"):
        assert words in str(caught.value)
    pending = pending_shards(run.folder, run.plan)
    assert pending == tuple(range(1, len(run.plan.shards)))
    run.compute(pending)
    assert rows_of(run) == whole["as planned"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_shards_of_another_run_are_set_aside_and_never_merged(
    mistake: str,
    make_run: Callable[[str, Path], MadeRun],
    whole: dict[str, dict[str, Row]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, other = make_run("as planned", tmp_path / "run"), make_run(mistake, tmp_path / "other")
    run.compute()
    other.compute([0])
    shutil.copy(other.folder.shard(0), run.folder.shard(0))
    with pytest.raises(MismatchError) as caught:
        aggregate(run.folder, run.plan, run.store)
    for words in ("shard_00000.h5", "in the file and", "old setting", "--force", "virnuc reprocess"):
        assert words in str(caught.value)
    assert not run.folder.embeddings.exists()
    with caplog.at_level(logging.WARNING):
        assert pending_shards(run.folder, run.plan) == (0,)
    assert "shard_00000.h5.damaged-1" in caplog.text
    run.compute([0])
    assert rows_of(run) == whole["as planned"]


def test_the_runs_do_differ(whole: dict[str, dict[str, Row]]) -> None:
    """What the tests above compare would tell them apart."""
    planned = whole["as planned"]
    for mistake in ("smaller model", "other weights", "other head"):
        assert whole[mistake].keys() == planned.keys()
        assert all(whole[mistake][name] != planned[name] for name in planned)
    assert whole["other chunks"].keys() != planned.keys()
    assert np.isfinite([row["scores"] for row in planned.values()]).all()
