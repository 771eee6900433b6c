"""The benchmark on a GPU: every precision against its floor, and end to end."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.forward import gemm_floor, main
from virnuc_core.models.hub import open_checkpoint

pytestmark = pytest.mark.gpu

PRECISIONS = ["fp32", "fp16", "bf16"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    PRECISIONS.append("fp8")
QUICK = ["--devices", "0", "--seconds", "0.2", "--repeats", "1", "--token-budget", "8192"]


@pytest.mark.parametrize("model", ["esm2:random:tiny", "dnabert:random:tiny"])
def test_every_precision_is_measured(model: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", model, "--precision", ",".join(PRECISIONS)]
    main([*arguments, *QUICK, "--lengths", "fixed:500,lognormal", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [case["precision"] for case in result["cases"][::2]] == PRECISIONS
    assert result["machine"]["device"] == torch.cuda.get_device_name(0)
    for case in result["cases"]:
        assert 0 < case["over_floor"] < 1.1
        assert case["peak_memory_bytes"] > 0
        assert case["forward"]["packing_efficiency"] > 0.9


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_floor_multiplies(precision: str) -> None:
    floor = gemm_floor(open_checkpoint("random:tiny", "esm2").spec, precision, 256, "cuda:0")
    floor()
    torch.cuda.synchronize()


def test_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", "esm2:random:tiny", "--precision", "fp16"]
    main([*arguments, *QUICK, "--end-to-end", "1", "--out", str(out)])
    [run] = json.loads(out.read_text())["cases"][0]["end_to_end"]
    assert run["devices"] == ["cuda:0"]
    assert run["over_gpu_only"] > 0
