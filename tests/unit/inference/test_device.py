import pytest
import torch

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.inference.device import (
    cpu_has_bf16,
    default_token_budget,
    resolve_devices,
    resolve_precision,
    torch_dtype,
)
from virnuc_core.specs import ModelSpec

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
    with pytest.raises(DeviceError, match="does not compute in fp16"):
        resolve_precision("fp16", "cpu")


def test_bf16_on_the_cpu_needs_the_instructions() -> None:
    if cpu_has_bf16():
        assert resolve_precision("bf16", "cpu") == "bf16"
    else:
        with pytest.raises(DeviceError, match="no bf16 instructions"):
            resolve_precision("bf16", "cpu")


def test_auto_on_a_gpu_is_fp16() -> None:
    assert resolve_precision("auto", "cuda:0") == "fp16"
    assert torch_dtype("fp16") is torch.float16


def test_wide_models_need_fewer_tokens_on_a_gpu() -> None:
    def budget(width: int, device: str) -> int:
        spec = ModelSpec(
            family="esm2",
            num_layers=6,
            embedding_dim=width,
            num_heads=20,
            ffn_dim=4 * width,
            vocab_size=33,
            layer_norm_eps=1e-5,
        )
        return default_token_budget(spec, device)

    budgets = [budget(width, "cuda:0") for width in (320, 640, 1280, 2560, 5120)]
    assert budgets == sorted(budgets, reverse=True)
    assert budget(320, "cpu") < budgets[-1]
