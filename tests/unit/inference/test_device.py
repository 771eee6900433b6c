import os
from pathlib import Path

import pytest
import torch

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.inference import device
from virnuc_core.inference.device import (
    cpu_has_bf16,
    default_token_budget,
    fitting_token_budget,
    resolve_devices,
    resolve_precision,
    weight_bytes,
)
from virnuc_core.specs import ModelSpec

GB = 10**9
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@without_gpu
def test_auto_falls_back_to_the_cpu() -> None:
    assert resolve_devices(("auto",)) == ("cpu",)
    assert resolve_devices(("cpu",)) == ("cpu",)


@without_gpu
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"GPU 0 is not available .* --devices cpu"):
        resolve_devices(("0",))


@pytest.mark.parametrize("choice", [("gpu",), ("cpu", "0"), ("auto", "1"), (), ("-1",), ("",)])
def test_what_is_no_device_is_refused(choice: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="not understood"):
        resolve_devices(choice)


def test_a_gpu_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        resolve_devices(("1", "0", "1"))


def test_precision_on_the_cpu() -> None:
    assert resolve_precision("auto", "cpu") == "fp32"
    assert resolve_precision("fp32", "cpu") == "fp32"
    for precision in ("fp16", "fp8"):
        with pytest.raises(DeviceError, match=f"does not compute in {precision}"):
            resolve_precision(precision, "cpu")


def test_bf16_on_the_cpu_needs_the_instructions() -> None:
    if cpu_has_bf16():
        assert resolve_precision("bf16", "cpu") == "bf16"
    else:
        with pytest.raises(DeviceError, match="no bf16 instructions"):
            resolve_precision("bf16", "cpu")


def test_auto_on_a_gpu_is_fp16() -> None:
    assert resolve_precision("auto", "cuda:0") == "fp16"


def spec(width: int, num_layers: int = 6) -> ModelSpec:
    return ModelSpec(
        family="esm2",
        num_layers=num_layers,
        embedding_dim=width,
        num_heads=20,
        ffn_dim=4 * width,
        vocab_size=33,
        layer_norm_eps=1e-5,
    )


def test_wide_models_need_fewer_tokens_on_a_gpu() -> None:
    budgets = [fitting_token_budget(spec(width), "fp16", 140 * GB) for width in (320, 640, 1280, 2560)]
    assert budgets == [131_072, 131_072, 65_536, 65_536]
    assert default_token_budget(spec(320), "fp32", "cpu") < budgets[-1]


def test_a_small_gpu_gets_smaller_batches_and_what_does_not_fit_none() -> None:
    large = spec(2560, 36)
    budgets = [fitting_token_budget(large, "fp16", free * GB) for free in (80, 8, 7, 6)]
    assert budgets[0] == 65_536
    assert budgets == sorted(budgets, reverse=True)
    assert 1024 <= budgets[2] < budgets[1] < 65_536
    assert budgets[2] % 1024 == 0
    assert fitting_token_budget(large, "fp32", 11 * GB) < 1024
    assert fitting_token_budget(large, "fp8", 8 * GB) > budgets[1]


@pytest.mark.parametrize(
    ("num_layers", "width", "millions"), [(6, 320, 7.5), (33, 1280, 650), (36, 2560, 2838)]
)
def test_the_weights_are_as_many_as_the_name_says(num_layers: int, width: int, millions: float) -> None:
    found = weight_bytes(spec(width, num_layers), "fp16") / 2e6
    assert found == pytest.approx(millions, rel=0.05)


def test_free_memory_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-0a, 100'\necho 'GPU-1b, [N/A]'\necho 'GPU-2c, 300'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device._ask_free_memory() == {"GPU-0a": 100 * 2**20, "GPU-2c": 300 * 2**20}
    program.write_text("#!/bin/sh\nexit 9\n")
    assert device._ask_free_memory() == {}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert device._ask_free_memory() == {}
