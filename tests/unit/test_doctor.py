"""The doctor's findings on this machine and on simulated ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from virnuc_core import __version__
from virnuc_core.doctor import checks, preflight
from virnuc_core.doctor.checks import RunOutput, compare_outputs
from virnuc_core.env_config import reload
from virnuc_core.versions import series

VECTORS = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
SCORES = np.full((6, 2), 0.5, np.float32)


def test_the_cpu_computes_rightly() -> None:
    [device] = [finding for finding in checks.device_findings() if finding.name == "cpu"]
    assert "auto: fp32, sdpa attention" in device.found
    [self_test] = [finding for finding in checks.self_test_findings() if finding.name == "cpu"]
    assert self_test.state == "ok"


@pytest.mark.parametrize(
    ("built_for", "driver", "visible", "advice"),
    [
        (None, "580.65.06", None, "this torch is CPU-only"),
        ("13.0", "570.10", None, "CUDA 13.0 needs driver 580 or later"),
        ("13.0", "580.65.06", "7", "CUDA_VISIBLE_DEVICES is '7'"),
        ("12.8", "570.10", None, "torch cannot use the GPUs"),
        ("12.8", "570.10", "", ""),
    ],
)
def test_gpus_that_torch_does_not_see(
    built_for: str | None, driver: str, visible: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reload()
    found = checks._cuda(driver, num_gpus=2, seen=0)
    assert (found.state, found.is_device) == ("problem" if advice else "ok", True)
    assert advice in found.advice
    assert bool(found.advice) == bool(advice)


@pytest.mark.parametrize(
    ("change", "score_change", "state"),
    [(np.nan, 0, "problem"), (50.0, 0, "problem"), (0, 0.06, "problem"), (0, 0.001, "ok")],
)
def test_a_device_that_computes_wrongly_is_a_problem(change: float, score_change: float, state: str) -> None:
    vectors = VECTORS.copy()
    vectors[3, 2] += change
    reference = RunOutput((VECTORS, VECTORS), SCORES)
    found = compare_outputs("cuda:0", RunOutput((VECTORS, vectors), SCORES + score_change), reference)
    assert (found.state, found.is_device) == (state, True)
    assert ("wrong results" in found.advice) == (state == "problem")


def test_preflight_names_what_makes_this_host_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.host_fault() is None
    monkeypatch.setattr(preflight, "_LEAST_DISK_GB", 1e9)
    assert "free up space" in (preflight.host_fault() or "")
    assert preflight.version_fault(None) is None
    assert preflight.version_fault(f"{series(__version__)}.99") is None
    assert "0.0.1" in (preflight.version_fault("0.0.1") or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has a GPU")
def test_preflight_of_a_gpu_that_is_not_there() -> None:
    assert "no GPU" in (preflight.gpu_fault() or "")
