import os
from pathlib import Path

import pytest

from virnuc_cli.local_prefect import prepare_local_prefect
from virnuc_core import env_config
from virnuc_core.errors import UsageError


@pytest.fixture(autouse=True)
def _no_prefect_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    # Restores the environment after the test.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    env_config.reload()


def test_home_is_under_that_of_virnuc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "new" / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    env_config.reload()
    prepare_local_prefect()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "new" / "home" / "prefect")
    assert Path(os.environ["PREFECT_HOME"]).is_dir()
    assert "PREFECT_PROFILES_PATH" not in os.environ


def test_home_of_the_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "mine"))
    env_config.reload()
    prepare_local_prefect()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_server_in_the_users_profile_is_still_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect" / "profiles.toml").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_local_prefect()
    assert os.environ["PREFECT_PROFILES_PATH"] == str(tmp_path / ".prefect" / "profiles.toml")


def test_home_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "file"))
    env_config.reload()
    with pytest.raises(UsageError, match="VIRNUC_HOME"):
        prepare_local_prefect()
