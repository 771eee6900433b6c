"""Choice of device, arithmetic and batch size; recognizing out-of-memory errors, and of which memory."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from virnuc_core.errors import DeviceError, DeviceMemoryError, UsageError, VirnucError
from virnuc_core.inference.device import (
    cpu_has_bf16,
    cpu_has_fast_bf16,
    default_token_budget,
    fitting_token_budget,
    needed_bytes,
    resolve_devices,
    resolve_precision,
    weight_bytes,
)
from virnuc_core.models import kernels
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.checkpoint import parameter_shapes
from virnuc_core.models.memory import empty_pinned, is_out_of_memory, raise_on_oom
from virnuc_core.specs import FrameRule, ModelSpec, Precision
from virnuc_core.versions import QUACK_VERSION

GB = 10**9
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu() -> None:
    assert resolve_devices(("auto",)) == resolve_devices(("cpu",)) == ("cpu",)
    with pytest.raises(DeviceError, match=r"GPU 0 is not available .* --devices cpu"):
        resolve_devices(("0",))


@pytest.mark.parametrize(
    "choice", [("gpu",), ("cpu", "0"), ("auto", "1"), (), ("-1",), ("",), ("1", "0", "1")]
)
def test_what_is_no_choice_of_devices(choice: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="twice" if len(choice) == 3 else "not understood"):
        resolve_devices(choice)


@pytest.mark.parametrize(
    ("card", "capability", "choices"),
    [
        ("Tesla T4", (7, 5), {"auto", "fp16", "fp32"}),
        ("A100", (8, 0), {"auto", "fp16", "fp32", "bf16"}),
        ("RTX 3090", (8, 6), {"auto", "fp16", "fp32", "bf16"}),
        ("RTX 4090", (8, 9), {"auto", "fp16", "fp32", "bf16"}),
        ("H100", (9, 0), {"auto", "fp16", "fp32", "bf16", "fp8"}),
        ("RTX 5090", (12, 0), {"auto", "fp16", "fp32", "bf16"}),
    ],
)
def test_each_card_computes_in_what_it_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch, card: str, capability: tuple[int, int], choices: set[Precision]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.setattr(kernels, "_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "installed_version", lambda package: QUACK_VERSION)
    for choice in choices:
        assert resolve_precision(choice, "cuda:1") == ("fp16" if choice == "auto" else choice)
    missing: set[Precision] = {"bf16", "fp8"} - choices
    refusals = {
        "bf16": rf"cuda:1 \({card}\) has no bf16.*--precision fp16",
        "fp8": r"fp8 needs a Hopper GPU.*cuda:1.*--precision fp16",
    }
    for choice in missing:
        with pytest.raises(DeviceError, match=refusals[choice]):
            resolve_precision(choice, "cuda:1")


def test_fp8_needs_the_known_version_of_quack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.setattr(kernels, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "installed_version", lambda package: "0.6.4")
    with pytest.raises(DeviceError, match=rf"quack-kernels {QUACK_VERSION}"):
        resolve_precision("fp8", "cuda:1")


def test_bf16_is_slow_on_intel_without_amx(tmp_path: Path) -> None:
    intel, amd = tmp_path / "intel", tmp_path / "amd"
    intel.write_text("vendor_id\t: GenuineIntel\n")
    amd.write_text("vendor_id\t: AuthenticAMD\n")
    assert cpu_has_fast_bf16(intel) == (cpu_has_bf16() and torch.cpu._is_amx_tile_supported())
    assert cpu_has_fast_bf16(amd) == cpu_has_fast_bf16(tmp_path / "none") == cpu_has_bf16()


@pytest.mark.parametrize(
    ("choice", "where", "frames", "expected"),
    [
        ("auto", "cuda:0", "open", "fp16"),
        ("auto", "cuda:0", "longest", "fp16"),
        ("auto", "cpu", "open", "fp32"),
        ("auto", "cpu", "longest", "bf16" if cpu_has_fast_bf16() else "fp32"),
        ("fp32", "cpu", "longest", "fp32"),
        ("fp16", "cpu", "open", "does not support fp16"),
        ("fp8", "cpu", "open", "does not support fp8"),
        ("bf16", "cpu", "open", "bf16" if cpu_has_bf16() else "no bf16 instructions"),
    ],
)
def test_precision(choice: Precision, where: str, frames: FrameRule, expected: str) -> None:
    if " " not in expected:
        assert resolve_precision(choice, where, frames) == expected
        return
    with pytest.raises(DeviceError, match=expected):
        resolve_precision(choice, where, frames)


def spec(width: int, num_layers: int = 6) -> ModelSpec:
    [entry] = find_entries("650M", "esm2")
    return replace(entry.spec, num_layers=num_layers, embedding_dim=width, ffn_dim=4 * width)


def test_a_batch_is_what_the_model_and_the_free_memory_of_the_gpu_allow() -> None:
    budgets = [fitting_token_budget(spec(width), "fp16", 140 * GB) for width in (320, 640, 1280, 2560)]
    assert budgets == [131_072, 131_072, 65_536, 65_536]
    assert default_token_budget(spec(320), "fp32", "cpu") < budgets[-1]
    large = spec(2560, 36)
    assert weight_bytes(large, "fp16") == pytest.approx(2 * 2838e6, rel=0.05)
    budgets = [fitting_token_budget(large, "fp16", free * GB) for free in (80, 8, 7, 6)]
    assert budgets[0] == 65_536
    assert budgets == sorted(budgets, reverse=True)
    assert 1024 <= budgets[2] < budgets[1] < 65_536
    assert budgets[2] % 1024 == 0
    assert fitting_token_budget(large, "fp32", 11 * GB) < 1024
    assert fitting_token_budget(large, "fp8", 8 * GB) > budgets[1]


@pytest.mark.parametrize("result", ["forward_3B", "forward_650M", "forward_8M", "forward_dnabert_s"])
def test_memory_is_about_what_was_measured(result: str) -> None:
    for case in json.loads((RESULTS / f"{result}.json").read_text())["cases"]:
        [entry] = find_entries(case["model"].removeprefix("random:"), case["family"])
        needed = needed_bytes(entry.spec, case["precision"], case["token_budget"])
        least = 0.9 if case["precision"] == "fp8" else 0.3  # QuACK's products need fewer buffers than others
        assert least <= case["peak_memory_bytes"] / needed <= 1.1, case["precision"]


@pytest.mark.parametrize(
    ("text", "expected"),  # as torch 2.13, Triton 3.7, cuBLAS and cuDNN word them
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA driver error: out of memory", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        ("out of resource: shared memory, Required: 164368, Hardware limit: 101376.", False),
    ],
)
def test_a_device_that_is_full_is_recognised(text: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(text), "cuda:0") is expected


def test_the_memory_of_the_host_is_that_of_the_cpu_only() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value, "cpu")
    assert not is_out_of_memory(caught.value, torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("CUDA error: out of memory", DeviceMemoryError, "cannot pin 4 MB"),
        ("can't allocate memory: you tried to allocate 4", DeviceMemoryError, "cannot pin 4 MB"),
        ("CUDA error: an illegal memory access", RuntimeError, "an illegal memory access"),
    ],
)
def test_memory_that_cannot_be_pinned_is_of_the_host(
    monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], message: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(error, match=message) as caught:
        empty_pinned((1000, 1000), torch.float32)
    # For a RuntimeError a batch would be halved.
    assert isinstance(caught.value, VirnucError) is not isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("CUDA error: out of memory", "cuda:0", "cuda:0 has too little memory for it"),
        ("DefaultCPUAllocator: can't allocate memory", "cuda:0", "this host has too little memory for it"),
    ],
)
def test_what_there_was_no_memory_for_is_named(text: str, where: str, message: str) -> None:
    with pytest.raises(DeviceMemoryError, match=message), raise_on_oom("it", where):
        raise RuntimeError(text)


def test_the_parameters_of_the_catalogue_are_those_of_the_published_models() -> None:
    named = {"8M": 8e6, "35M": 35e6, "150M": 150e6, "650M": 650e6, "3B": 3e9, "15B": 15e9, "DNABERT-S": 117e6}
    for name, wanted in named.items():
        [entry] = find_entries(name, None)
        found = sum(map(math.prod, parameter_shapes(entry.spec).values()))
        assert found == pytest.approx(wanted, rel=0.08), name
