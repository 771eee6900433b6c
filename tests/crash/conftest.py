"""Small models and contigs for all runs here."""

from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, make_models, plan_run, write_contigs


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> MadeModels:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def contigs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contigs(tmp_path_factory.mktemp("contigs") / "contigs.fa")


@pytest.fixture
def run(tmp_path: Path, models: MadeModels, contigs: Path) -> MadeRun:
    """A planned run of a dozen shards."""
    return plan_run(tmp_path / "run", contigs, models.config(), shard_seconds=0.02)
