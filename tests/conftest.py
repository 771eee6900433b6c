"""Fixtures of all tests: a clean environment, a separate home folder, deterministic properties."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from deployments.prefect_settings import prepare_prefect
from tests.forked_lanes import fork_lanes
from virnuc_core import env_config

_HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()

# Reproducible examples, and no deadline on busy machines.
# `pytest --hypothesis-profile=explore` generates new and more examples.
settings.register_profile(
    "deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("deterministic")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the session's home folder before a test module imports Prefect, which reads it once."""
    home = config.stash[_HOME] = tempfile.TemporaryDirectory(
        prefix="virnuc-tests-", ignore_cleanup_errors=True
    )
    for name in [name for name in os.environ if name.startswith(("VIRNUC_", "PREFECT_", "MLFLOW_"))]:
        del os.environ[name]
    os.environ["VIRNUC_HOME"] = home.name
    os.environ["PREFECT_HOME"] = f"{home.name}/prefect"
    prepare_prefect()
    # As in runs of a deployment.
    os.environ["PREFECT_LOGGING_EXTRA_LOGGERS"] = "virnuc_core,tasks,flows"
    os.environ["PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW"] = "ignore"
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # runs the kernels on the CPU; Triton reads it on import


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_HOME].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Iterator[None]:
    """Removes the user's VIRNUC_ variables and those of earlier tests, and comes back to this folder after the test."""
    monkeypatch.chdir(Path.cwd())
    for name in [name for name in os.environ if name.startswith("VIRNUC_")]:
        monkeypatch.delenv(name)
    for name in ("MLFLOW_TRACKING_URI", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VIRNUC_HOME", pytestconfig.stash[_HOME].name)
    env_config.reload()
    yield
    env_config.env.cache_clear()


@pytest.fixture
def set_env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets variables, as virnuc reads them."""

    def set_and_reload(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        env_config.reload()

    return set_and_reload


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fails a test that leaves threads behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def fast_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_lanes(monkeypatch)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def examples_dir() -> Path:
    return Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Larger test data: `../shared` beside the checkout."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the folder `shared` with the larger test data is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    # As on the command line: ending the heartbeat takes a second per flow and lane.
    no_heartbeat = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with prefect_test_harness(server_startup_timeout=120), no_heartbeat:
        yield
