"""Finished runs with heads of both kinds; tests must not modify them."""

from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, plan_run, write_results


@pytest.fixture(scope="session")
def longest_run(tmp_path_factory: pytest.TempPathFactory, contigs: Path, made_models: MadeModels) -> MadeRun:
    """The same as `finished_run`, with the other head."""
    config = made_models.config(head=str(made_models.longest_head))
    made = plan_run(tmp_path_factory.mktemp("longest"), contigs, config)
    made.compute()
    write_results(made)
    return made


@pytest.fixture(params=["open", "longest"])
def each_run(request: pytest.FixtureRequest, finished_run: MadeRun, longest_run: MadeRun) -> MadeRun:
    return finished_run if request.param == "open" else longest_run
