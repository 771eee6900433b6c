"""Environment variables are read late, once, and strictly."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_core.env_config import (
    available_threads,
    env,
    home_folder,
    ignored_variables,
    reload,
)
from virnuc_core.errors import UsageError


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIRNUC_HOME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    config = reload()
    assert config.home == Path("~/.virnuc").expanduser()
    assert config.switches == ()
    assert config.threads is None
    assert config.cuda_visible_devices is None
    assert config.tracking_uri is None
    assert available_threads() >= 1


def test_a_new_home_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there is left as it is, and folders in it are open to those that it is open to."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    before = os.umask(0)
    try:
        for home, mode in ((tmp_path / "made" / "home", 0o700), (shared, 0o770)):
            monkeypatch.setenv("VIRNUC_HOME", str(home))
            reload()
            assert home_folder() == home
            assert home_folder("up") == home / "up"
            assert {stat.S_IMODE(folder.stat().st_mode) for folder in (home, home / "up")} == {mode}
    finally:
        os.umask(before)
    monkeypatch.setenv("VIRNUC_HOME", "/proc/nowhere")
    reload()
    assert home_folder("up") == Path("/proc/nowhere/up")


def test_a_change_is_seen_after_reload_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env().switches == ()
    monkeypatch.setenv("VIRNUC_DISABLE_FP16", "1")
    assert env().switches == ()
    assert reload().switches == ("VIRNUC_DISABLE_FP16",)
    assert env().switches == ("VIRNUC_DISABLE_FP16",)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), (" ON ", True), ("0", False), ("no", False), ("", False)]
)
def test_flags(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("VIRNUC_V1_ATTENTION", text)
    assert ("VIRNUC_V1_ATTENTION" in reload().switches) is value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VIRNUC_DISABLE_FP16", "maybe"),
        ("VIRNUC_DISABLE_PACKING", "2"),
        ("VIRNUC_DISABLE_COMPILE", "never"),
        ("VIRNUC_THREADS", "0"),
        ("VIRNUC_THREADS", "two"),
        ("VIRNUC_LANE_TIMEOUT", "-1"),
        ("VIRNUC_LANE_TIMEOUT", "5 s"),
        ("VIRNUC_LANE_TIMEOUT", "nan"),
        ("VIRNUC_LANE_TIMEOUT", "inf"),
    ],
)
def test_a_value_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name} is '{text}'"):
        reload()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("OMP_NUM_THREADS", 3), ("VIRNUC_THREADS", 5)):
        monkeypatch.setenv(name, str(number))
        reload()
        assert available_threads() == number


@pytest.mark.parametrize(("text", "value"), [("", ()), ("2,3", ("2", "3"))])
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, text: str, value: tuple[str, ...]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert reload().cuda_visible_devices == value


def test_nothing_is_read_at_import() -> None:
    command = "import virnuc_core.env_config, sys; print('torch' in sys.modules)"
    environment = {**os.environ, "VIRNUC_DISABLE_FP16": "neither"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("VIRNUCPRO_DISABLE_PACKING", "set VIRNUC_DISABLE_PACKING instead"),
        ("VIRNUCPRO_VIRAL_CHECKPOINT_MODE", "use the flags of virnuc predict --help-all instead"),
    ],
)
def test_variables_of_the_predecessor_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    assert ignored_variables() == []
    monkeypatch.setenv(name, "1")
    [warning] = ignored_variables()
    assert warning.startswith(f"{name} is a variable of VirNucPro")
    assert advice in warning
