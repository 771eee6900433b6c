"""Session-wide small models and a finished run on them."""

from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, make_models, plan_run, write_contigs
from virnuc_core.inference.lane_process import LaneProcess
from virnuc_core.inference.lanes import ignore
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.tables import write_tables


@pytest.fixture(scope="session")
def made_models(tmp_path_factory: pytest.TempPathFactory) -> MadeModels:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def contigs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contigs(tmp_path_factory.mktemp("contigs") / "contigs.fa")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, made_models: MadeModels, contigs: Path) -> MadeRun:
    """A predict run with shards, embeddings and tables; tests must not modify it."""
    run = plan_run(tmp_path_factory.mktemp("run"), contigs, made_models.config())
    with LaneProcess("cpu") as lane:
        lane.run(run.folder, range(len(run.plan.shards)), 0, ignore)
    aggregate(run.folder, run.plan, run.store)
    write_tables(run.folder, run.store, run.head, run.plan.calls)
    return run
