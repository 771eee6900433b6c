"""Environment variables are read late, once, and strictly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_core.env_config import available_threads, env, ignored_variables, reload
from virnuc_core.errors import UsageError


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIRNUC_HOME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    config = reload()
    assert config.home == Path("~/.virnuc").expanduser()
    assert (config.switches, config.compile_cache_gb) == ((), 5)
    assert config.threads is config.cuda_visible_devices is config.tracking_uri is None
    assert available_threads() >= 1


def test_a_change_is_seen_after_reload_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env().switches == ()
    monkeypatch.setenv("VIRNUC_DISABLE_FP16", "1")
    assert env().switches == ()
    assert reload().switches == ("VIRNUC_DISABLE_FP16",)
    assert env().switches == ("VIRNUC_DISABLE_FP16",)


SWITCH = "VIRNUC_V1_ATTENTION"


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        *((SWITCH, text, "switches", (SWITCH,)) for text in ("1", "true", " ON ")),
        *((SWITCH, text, "switches", ()) for text in ("0", "no", "")),
        ("CUDA_VISIBLE_DEVICES", "", "cuda_visible_devices", ()),
        ("CUDA_VISIBLE_DEVICES", "2,3", "cuda_visible_devices", ("2", "3")),
        ("OMP_NUM_THREADS", "3", "threads", 3),
        ("VIRNUC_THREADS", "5", "threads", 5),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, field: str, value: object) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(name, text)
    assert getattr(reload(), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VIRNUC_DISABLE_FP16", "maybe"),
        ("VIRNUC_DISABLE_PACKING", "2"),
        ("VIRNUC_DISABLE_COMPILE", "never"),
        ("VIRNUC_THREADS", "0"),
        ("VIRNUC_THREADS", "two"),
        *(("VIRNUC_COMPILE_CACHE_GB", text) for text in ("-1", "5 GB", "nan", "inf")),
    ],
)
def test_a_value_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name} is '{text}'"):
        reload()


def test_nothing_is_read_at_import() -> None:
    command = "import virnuc_core.env_config, sys; print('torch' in sys.modules)"
    environment = {**os.environ, "VIRNUC_DISABLE_FP16": "neither"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("VIRNUCPRO_DISABLE_PACKING", "set VIRNUC_DISABLE_PACKING instead"),
        ("VIRNUCPRO_VIRAL_CHECKPOINT_MODE", "from-virnucpro.md says what to use instead"),
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
