import os
from pathlib import Path

import pytest

from virnuc_cli.local_prefect import prepare_local_prefect
from virnuc_core import env_config
from virnuc_core.errors import UsageError


@pytest.fixture(autouse=True)
def _no_prefect_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Restores the environment after the test.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ["HOME"] = str(tmp_path)
    env_config.reload()


def test_home_is_under_that_of_virnuc(tmp_path: Path) -> None:
    os.environ["VIRNUC_HOME"] = str(tmp_path / "new" / "home")
    env_config.reload()
    prepare_local_prefect()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "new" / "home" / "prefect")
    assert Path(os.environ["PREFECT_HOME"]).is_dir()
    assert "PREFECT_PROFILES_PATH" not in os.environ


def test_home_and_server_of_the_user_are_left_alone(tmp_path: Path) -> None:
    profiles = tmp_path / ".prefect" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.touch()
    prepare_local_prefect()
    assert os.environ["PREFECT_PROFILES_PATH"] == str(profiles)
    os.environ["PREFECT_HOME"] = str(tmp_path / "mine")
    env_config.reload()
    prepare_local_prefect()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.environ["VIRNUC_HOME"] = str(tmp_path / "file")
    env_config.reload()
    with pytest.raises(UsageError, match="VIRNUC_HOME"):
        prepare_local_prefect()
