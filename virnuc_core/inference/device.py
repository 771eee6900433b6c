"""Which devices, arithmetic and batch size a run uses: asked for or found out, and never silently changed."""

import logging
from typing import Literal

import torch

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.specs import ModelSpec, Precision

ResolvedPrecision = Literal["fp32", "fp16", "bf16"]

_DTYPES: dict[ResolvedPrecision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# On the CPU a batch should stay within the caches (1,000 to 4,000 tokens are within 2 %, 8,000 lose 10 %);
# on a GPU it must be large enough to fill the card, and a wide model does that with fewer tokens.
_CPU_TOKEN_BUDGET = 2048
_CUDA_TOKEN_BUDGETS = ((2560, 32_768), (1280, 65_536))
_CUDA_SMALL_MODEL_TOKEN_BUDGET = 131_072

_log = logging.getLogger(__name__)


def resolve_devices(choice: tuple[str, ...]) -> tuple[str, ...]:
    """Turns what was asked for into torch device names.

    Args:
        choice: ("auto",) for every GPU, or the CPU where there is none; ("cpu",); or indices of GPUs.

    Returns:
        "cpu" alone, or "cuda:0", "cuda:1", ..., in the order asked for.

    Raises:
        UsageError: a name is not a device, is given twice, or mixes CPU and GPUs.
        DeviceError: a GPU is asked for that is not there.
    """
    available = torch.cuda.device_count()
    if choice == ("auto",):
        devices = tuple(f"cuda:{i}" for i in range(available)) or ("cpu",)
        _log.info("devices: %s (found automatically)", ", ".join(devices))
        return devices
    if choice == ("cpu",):
        return choice
    if not choice or not all(name.isascii() and name.isdigit() for name in choice):
        raise UsageError(
            f"--devices {','.join(choice)} is not understood: give auto, cpu, or GPU indices such as 0,1"
        )
    indices = [int(name) for name in choice]
    if len(set(indices)) < len(indices):
        raise UsageError(f"--devices {','.join(choice)} names a GPU twice: give each index once")
    missing = [index for index in indices if index >= available]
    if missing:
        there = f"indices 0 to {available - 1}" if available else "none"
        raise DeviceError(
            f"GPU {', '.join(map(str, missing))} is not available (GPUs that torch {torch.__version__} sees: "
            f"{there}): choose another index, or --devices cpu"
        )
    return tuple(f"cuda:{index}" for index in indices)


def resolve_precision(choice: Precision, device: str) -> ResolvedPrecision:
    """The arithmetic of the forward pass on one device.

    "auto" is fp32 on the CPU and fp16 on a GPU. On the CPU fp16 is refused, and so is bf16 unless the
    processor has instructions for it (AVX512_BF16 or AMX): without them it is slower than fp32.

    Raises:
        DeviceError: the device cannot compute in the precision asked for at a useful speed.
    """
    if choice == "auto":
        return "fp32" if device == "cpu" else "fp16"
    if device == "cpu" and choice == "fp16":
        raise DeviceError("the CPU does not compute in fp16: use --precision fp32, or bf16 where it has it")
    if device == "cpu" and choice == "bf16" and not cpu_has_bf16():
        raise DeviceError(
            "this CPU has no bf16 instructions (AVX512_BF16 or AMX), so bf16 would be slower than fp32: "
            "use --precision fp32"
        )
    if device != "cpu" and choice == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise DeviceError(f"the GPU {device} has no bf16 instructions: use --precision fp16 or fp32")
    return choice


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 matrices in hardware."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def torch_dtype(precision: ResolvedPrecision) -> torch.dtype:
    """The torch dtype of a resolved precision."""
    return _DTYPES[precision]


def default_token_budget(spec: ModelSpec, device: str) -> int:
    """Tokens in one packed batch at which a model of this width is at or near its best speed."""
    if device == "cpu":
        return _CPU_TOKEN_BUDGET
    for width, budget in _CUDA_TOKEN_BUDGETS:
        if spec.embedding_dim >= width:
            return budget
    return _CUDA_SMALL_MODEL_TOKEN_BUDGET
