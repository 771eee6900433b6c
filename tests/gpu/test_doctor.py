"""The doctor's findings on GPUs."""

import pytest

from virnuc_core.doctor.checks import device_findings, self_test_findings
from virnuc_core.doctor.comparison import compare_model

pytestmark = pytest.mark.gpu


def test_gpus_are_described_with_what_auto_chooses() -> None:
    [gpu, *_] = [finding for finding in device_findings() if finding.name.startswith("cuda:")]
    assert gpu.state == "ok", gpu.summary
    assert "compute capability" in gpu.found
    assert "auto: fp16, triton attention" in gpu.found
    assert [finding.summary for finding in device_findings() if finding.state == "problem"] == []


def test_every_gpu_computes_rightly() -> None:
    findings = list(self_test_findings())
    assert findings[0].name == "cuda:0"
    assert [finding.summary for finding in findings if finding.state != "ok"] == []


@pytest.mark.parametrize("model", ["esm2:tiny", "dnabert:tiny"])
def test_both_models_equal_transformers_in_every_precision(model: str) -> None:
    pytest.importorskip("transformers")
    found = compare_model(model)
    assert found.device == "cuda:0"
    assert {run.precision for run in found.runs} >= {"fp32", "fp16", "bf16"}
    assert found.is_same, found.summary
