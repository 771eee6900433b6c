"""What every test gets: a clean environment, a home folder of its own, deterministic properties."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from virnuc_cli.local_prefect import prepare_local_prefect
from virnuc_core import env_config

_HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()

# The same examples on every run, and no deadline: machines that run tests are busy.
# `pytest --hypothesis-profile=explore` draws new and more examples.
settings.register_profile(
    "deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("deterministic")


def pytest_configure(config: pytest.Config) -> None:
    """Gives the whole session a home folder, before a test module imports Prefect, which reads it once."""
    home = config.stash[_HOME] = tempfile.TemporaryDirectory(
        prefix="virnuc-tests-", ignore_cleanup_errors=True
    )
    for name in [name for name in os.environ if name.startswith(("VIRNUC_", "PREFECT_", "MLFLOW_"))]:
        del os.environ[name]
    os.environ["VIRNUC_HOME"] = home.name
    os.environ["PREFECT_HOME"] = f"{home.name}/prefect"
    prepare_local_prefect()
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # the kernels run on the CPU then; Triton reads it when imported


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the home folder."""
    config.stash[_HOME].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """No VIRNUC_ variable of the user or of an earlier test reaches a test."""
    for name in [name for name in os.environ if name.startswith("VIRNUC_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("VIRNUC_HOME", pytestconfig.stash[_HOME].name)
    monkeypatch.setenv("XDG_CONFIG_HOME", f"{pytestconfig.stash[_HOME].name}/no-settings")
    env_config.reload()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of test data in the repository."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def examples_dir() -> Path:
    """The folder of example sequences in the repository."""
    return Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of larger test data, `../shared` beside the checkout."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the folder `shared` with the larger test data is not beside this checkout")
    return folder
