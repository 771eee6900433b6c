"""Resolves devices, precision and batch size of a run, without silent fallback; host-device copies."""

import logging
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from virnuc_core.errors import DeviceError, DeviceMemoryError, UsageError
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.kernels import has_quack
from virnuc_core.models.memory import empty_pinned
from virnuc_core.specs import FRAME_KINDS, FrameRule, ModelSpec, Precision, ResolvedPrecision
from virnuc_core.versions import QUACK, QUACK_VERSION

_ACTIVATION_BYTES: Final[dict[ResolvedPrecision, int]] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}

_log = logging.getLogger(__name__)


def resolve_devices(choice: tuple[str, ...]) -> tuple[str, ...]:
    """Torch names of devices: "cpu" alone, or "cuda:0", "cuda:1", ..., in the given order.

    `choice` is ("auto",) for all GPUs, or the CPU if there is none; ("cpu",); or GPU indices.

    Raises:
        UsageError: a name is invalid or repeated, or CPU and GPUs are mixed.
        DeviceError: a GPU does not exist.
    """
    available = torch.cuda.device_count()
    if choice == ("auto",):
        devices = tuple(f"cuda:{i}" for i in range(available)) or ("cpu",)
        _log.info("devices: %s (auto)", ", ".join(devices))
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


def resolve_precision(choice: Precision, device: str, frames: FrameRule = "open") -> ResolvedPrecision:
    """Precision of the forward pass on one device; "auto" is fp16 on a GPU.

    On the CPU "auto" is bf16 for the longest ORFs where `cpu_has_fast_bf16`, and else fp32: VirNucPro's frames are scored
    as VirNucPro does. The CPU has neither fp16 nor fp8. On a GPU, bf16 needs Ampere or newer, and fp8 Hopper and QuACK.

    Raises:
        DeviceError: the device does not support the precision at a useful speed.
    """
    if choice == "auto":
        if device != "cpu":
            return "fp16"
        return "bf16" if FRAME_KINDS[frames].takes_bf16 and cpu_has_fast_bf16() else "fp32"
    if device == "cpu" and choice in ("fp16", "fp8"):
        raise DeviceError(f"the CPU does not support {choice}: use --precision fp32, or bf16 where available")
    if device == "cpu" and choice == "bf16" and not cpu_has_bf16():
        raise DeviceError(
            "this CPU has no bf16 instructions (AVX512_BF16, AMX or Armv8.6), so bf16 would be slower than fp32: "
            "use --precision fp32"
        )
    if device != "cpu" and choice == "bf16" and torch.cuda.get_device_capability(device) < (8, 0):
        raise DeviceError(
            f"the GPU {device} ({torch.cuda.get_device_name(device)}) has no bf16 instructions, which need Ampere "
            "(compute capability 8.0): use --precision fp16"
        )
    if choice == "fp8" and not has_quack(torch.device(device)):
        raise DeviceError(
            f"fp8 needs a Hopper GPU (compute capability 9.0), Triton, and {QUACK} {QUACK_VERSION} "
            f"(pip install 'virnuc[gpu]'), and {device} lacks one of them: use --precision fp16 or bf16"
        )
    return choice


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices in hardware, and torch uses it."""
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # oneDNN's own check holds on any x86 with AVX512, where it emulates bf16.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def cpu_has_fast_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU computes bf16 faster than fp32.

    Intel's AVX512_BF16 without AMX takes about twice as long as fp32; AMD's takes two thirds of its time.
    """
    if not cpu_has_bf16() or torch.cpu._is_amx_tile_supported() or not cpuinfo.exists():
        return cpu_has_bf16()
    return "GenuineIntel" not in cpuinfo.read_text()


def default_token_budget(spec: ModelSpec, precision: ResolvedPrecision, *devices: str) -> int:
    """Tokens per packed batch for near-peak throughput within the free memory of all devices."""
    if devices == ("cpu",):
        return saturating_token_budget(spec, "cpu")
    device, free_bytes = least_free_memory(devices)
    budget = fitting_token_budget(spec, precision, free_bytes)
    if budget < 1024:
        raise DeviceMemoryError(
            f"{device} has {free_bytes / 1e9:.1f} GB free, too little for the weights of this "
            f"{spec.family} model in {precision} ({weight_bytes(spec, precision) / 1e9:.1f} GB) and a batch: "
            "choose a smaller model, another --precision, or a device with more memory."
        )
    return budget


def fitting_token_budget(spec: ModelSpec, precision: ResolvedPrecision, free_bytes: int) -> int:
    """Tokens per packed batch that saturate a GPU, or as many as fit beside the weights."""
    # The rest is for the other model, batches in flight and unaccounted allocations.
    for_batches = 0.4 * (free_bytes - weight_bytes(spec, precision))
    fitting = int(for_batches / _activation_bytes(spec, precision))
    return min(saturating_token_budget(spec, "cuda"), fitting // 1024 * 1024)


def saturating_token_budget(spec: ModelSpec, device_type: Literal["cpu", "cuda"]) -> int:
    """Tokens per packed batch at which a type of device reaches peak throughput."""
    # On the CPU a batch should fit in the caches (1,000 to 4,000 tokens are within 2%, 8,000 lose 10%); on a GPU it must
    # saturate the device, for which a wide model needs fewer tokens.
    if device_type == "cpu":
        return 2048
    return 65_536 if spec.embedding_dim >= 1280 else 131_072


def needed_bytes(spec: ModelSpec, precision: ResolvedPrecision, token_budget: int) -> int:
    """Peak memory of the weights and one batch."""
    return weight_bytes(spec, precision) + token_budget * _activation_bytes(spec, precision)


def weight_bytes(spec: ModelSpec, precision: ResolvedPrecision) -> int:
    """Memory of the weights on the device."""
    ffn_matrices = 2 if spec.family == "esm2" else 3
    layer_bytes = 1 if precision == "fp8" else _ACTIVATION_BYTES[precision]
    layer = 4 * spec.embedding_dim**2 + ffn_matrices * spec.embedding_dim * spec.ffn_dim
    outside = spec.vocab_size * spec.embedding_dim
    return spec.num_layers * layer * layer_bytes + outside * _ACTIVATION_BYTES[precision]


def least_free_memory(devices: Sequence[str]) -> tuple[str, int]:
    """The GPU with the least free memory, and its free bytes.

    Uses nvidia-smi: a CUDA context takes memory on every GPU, and blocks lanes from GPUs in exclusive-process mode. Memory
    of a GPU that nvidia-smi does not list counts as free.
    """
    rows = query_gpus(("uuid", "memory.free"))
    free_by_uuid = {row[0]: int(row[1]) << 20 for row in rows if len(row) == 2 and row[1].isdecimal()}
    found = []
    for device in devices:
        properties = torch.cuda.get_device_properties(device)
        total = int(properties.total_memory)
        found.append((min(total, free_by_uuid.get(f"GPU-{properties.uuid}", total)), device))
    free_bytes, device = min(found)
    return device, free_bytes


def _activation_bytes(spec: ModelSpec, precision: ResolvedPrecision) -> int:
    """Peak bytes per token of a layer.

    Residual, norm, queries, keys, values and attention output are 6 D; the feed-forward 2 F, or 3 F if gated; pooling D in
    fp32. QuACK's products need half of that at most; in fp8 sums, queries, keys and values are 4 D in bf16, sums and attention
    output 2 D in fp8.
    """
    if precision == "fp8":
        return 11 * spec.embedding_dim
    size, ffn_buffers = _ACTIVATION_BYTES[precision], 2 if spec.family == "esm2" else 3
    return (6 * spec.embedding_dim + ffn_buffers * spec.ffn_dim) * size + 4 * spec.embedding_dim


@dataclass(frozen=True, slots=True)
class AsyncCopy:
    """Tensors being copied to the host, not to be read before `wait`; `done` is None when they are there."""

    tensors: tuple[Tensor, ...]
    done: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """Waits for the copy and returns the tensors."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensors


def on_device(device: str) -> AbstractContextManager[object]:
    """A block in which kernels are launched on this device, on its default stream."""
    if torch.device(device).type == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(device))


class Streams:
    """Host-device copies; on a GPU, uploads, models and downloads overlap on three streams. The host waits for copies only.

    `max_in_flight` batches are launched before the first is retired: enough to keep the GPU busy, few enough to detect
    non-finite vectors early.
    """

    def __init__(self, device: str) -> None:
        self.device: Final = torch.device(device)
        self.max_in_flight: Final = 0 if self.device.type == "cpu" else 3
        self._compute = self._uploads = self._downloads = None
        if self.device.type != "cpu":
            self._compute = torch.cuda.default_stream(self.device)
            self._uploads = torch.cuda.Stream(self.device)
            self._downloads = torch.cuda.Stream(self.device)

    def empty_pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised (size,) host tensor, pinned for a GPU."""
        return torch.empty(size, dtype=dtype) if self.device.type == "cpu" else empty_pinned((size,), dtype)

    def uploading(self) -> AbstractContextManager[object]:
        """A block in which non-blocking copies to the device overlap with the models."""
        return nullcontext() if self._uploads is None else torch.cuda.stream(self._uploads)

    def wait_for_upload(self, *uploads: Tensor | PackedLayout) -> None:
        """Makes the model stream, not the host, wait for these uploads."""
        if self._compute is not None and self._uploads is not None:
            self._compute.wait_stream(self._uploads)
            for upload in uploads:
                upload.record_stream(self._compute)

    def download(self, *tensors: Tensor) -> AsyncCopy:
        """Starts copying model results to the host."""
        if self._compute is None or self._downloads is None:
            return AsyncCopy(tensors, None)
        self._downloads.wait_stream(self._compute)
        with torch.cuda.stream(self._downloads):
            copies = []
            for tensor in tensors:
                tensor.record_stream(self._downloads)
                copies.append(empty_pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True))
            # Blocking: the waiting thread sleeps instead of spinning, freeing its core for the tokenizers.
            done = torch.cuda.Event(blocking=True)
            done.record(self._downloads)
        return AsyncCopy(tuple(copies), done)

    def free_memory(self) -> None:
        """Returns cached memory to the device."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
