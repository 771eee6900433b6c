"""A run resumes with its planned settings or not at all; rows are compared by name."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import h5py
import pytest

from tests.made_models import WIDTH, MadeRun, make_esm2, make_head, make_models, plan_run, write_contigs
from virnuc_core.errors import MismatchError
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import pending_shards
from virnuc_core.results.aggregate import aggregate
from virnuc_core.settings import RunConfig

Rows = Mapping[str, Mapping[str, tuple[float, ...]]]

MISTAKES = {
    "smaller model": r"esm2 model was 3B \(\w{12}\), now 650M \(\w{12}\)",
    "other weights": r"esm2 model was 3B \(\w{12}\), now 3B_again \(\w{12}\)",
    "other head": r"head \(--head\) was wide\.safetensors \(\w{12}\), now other_wide\.safetensors \(\w{12}\)",
    "other chunks": r"chunk_length \(--chunk-length\) was 60, now 90",
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Settings of a run on a larger ESM-2, as 3B is to 650M, and mistaken ones to resume it with."""
    folder = tmp_path_factory.mktemp("models")
    models = make_models(folder)
    large = str(make_esm2(folder / "3B", num_layers=4, width=2 * WIDTH))
    same_shape = str(make_esm2(folder / "3B_again", num_layers=4, width=2 * WIDTH, seed=9))
    wide = {"head": str(make_head(folder / "wide.safetensors", 3 * WIDTH))}
    other_wide = {"head": str(make_head(folder / "other_wide.safetensors", 3 * WIDTH, seed=9))}
    return {
        "as planned": models.config(esm_model=large, **wide),
        "smaller model": models.config(esm_model=str(make_esm2(folder / "650M", num_layers=3))),
        "other weights": models.config(esm_model=same_shape, **wide),
        "other head": models.config(esm_model=large, **other_wide),
        "other chunks": models.config(esm_model=large, chunk_length=90, **wide),
    }


@pytest.fixture(scope="module")
def contigs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contigs(tmp_path_factory.mktemp("contigs") / "in.fa", 16)


def rows_of(run: MadeRun) -> Rows:
    """Vectors and scores of each frame, by name."""
    aggregate(run.folder, run.plan, run.store)
    with h5py.File(run.folder.embeddings) as file:
        columns = {name: file[name][()] for name in ("dna", "protein", "scores")}
        names = file["frame_ids"].asstr()[()].tolist()
    assert len(set(names)) == len(names)
    return {
        name: {column: tuple(values[row].tolist()) for column, values in columns.items()}
        for row, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def expected(configs: dict[str, RunConfig], contigs: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows of an undisturbed run."""
    run = plan_run(tmp_path_factory.mktemp("whole") / "run", contigs, configs["as planned"])
    run.compute()
    return rows_of(run)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_run_is_resumed_as_it_was_planned_or_not_at_all(
    mistake: str,
    configs: dict[str, RunConfig],
    contigs: Path,
    expected: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the shards of another run are set aside and never merged."""
    run = plan_run(tmp_path / "run", contigs, configs["as planned"])
    run.compute([0])
    other = plan_run(tmp_path / "other", contigs, configs[mistake])
    other.compute()
    with pytest.raises(MismatchError, match=MISTAKES[mistake]) as resumed:
        open_plan(configs[mistake], other.store, "predict", ("cpu",), run.folder)
    pending = pending_shards(run.folder, run.plan)
    assert pending == tuple(range(1, len(run.plan.shards)))
    run.compute(pending)
    shutil.copy(other.folder.shard(0), run.folder.shard(0))
    with pytest.raises(MismatchError, match=r"shard_00000\.h5 .*in the file and") as merged:
        aggregate(run.folder, run.plan, run.store)
    for words in ("old setting", "--force", "virnuc reprocess"):
        assert words in str(resumed.value)
        assert words in str(merged.value)
    assert not run.folder.embeddings.exists()
    with caplog.at_level(logging.WARNING):
        assert pending_shards(run.folder, run.plan) == (0,)
    assert "shard_00000.h5.damaged-1" in caplog.text
    run.compute([0])
    assert rows_of(run) == expected
    others = rows_of(other)  # what was compared would have told them apart
    assert all(others.get(name) != row for name, row in expected.items()) or mistake == "other chunks"
    assert others != expected
