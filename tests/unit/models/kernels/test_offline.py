"""The kernels compiled for GPUs that are not present, within the shared memory and the registers of each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

_SCRIPT: Final = Path(__file__).with_name("compile_offline.py")
_TIMEOUT_SECONDS: Final = 900

# Maximum shared memory per block in bytes, by compute capability.
SHARED_MEMORY: Final = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}

MAX_SPILLED: Final = 400  # bytes a thread: heads of 128 columns in sequences of one tile, on 8.0

# Heads of up to 32 columns are padded to 32; rows of 320 to 5120 columns are those of ESM-2 8M to 15B. 8.0, 8.6 and 8.9
# get the same code but for the size of their shared memory and fp8, so they share out dtypes and sizes.
VARIANTS: Final = {
    80: ["rowwise:5120:bfloat16", "product:float16", "gated_product:bfloat16",
         "rotary:128:float16", "alibi:64:bfloat16", "rotary:24:bfloat16"],
    86: ["rowwise:1280:float16", "product:bfloat16", "gated_product:float16",
         "rotary:128:bfloat16", "alibi:64:float16", "rotary:16:float16"],
    89: ["rowwise:5120:bfloat16", "rowwise:320:float16", "product:float16", "gated_product:float16",
         "fp8_product:bfloat16", "fp8_gated_product:bfloat16",
         "alibi:128:float16", "alibi:64:float16", "rotary:64:float16", "fp8_alibi:64:bfloat16"],
    90: ["rowwise:5120:float16", "rowwise:480:bfloat16", "product:float16", "gated_product:bfloat16",
         "fp8_product:bfloat16", "fp8_gated_product:bfloat16",
         "rotary:128:float16", "alibi:64:bfloat16", "rotary:32:float16", "fp8_rotary:64:bfloat16"],
    100: ["rowwise:2560:float16", "product:bfloat16", "gated_product:float16", "fp8_product:bfloat16",
          "rotary:128:bfloat16", "alibi:64:float16"],
    120: ["rowwise:5120:float16", "rowwise:768:float16", "product:float16", "gated_product:bfloat16",
          "fp8_product:bfloat16", "fp8_gated_product:bfloat16",
          "rotary:128:float16", "rotary:64:bfloat16", "alibi:64:float16"],
}  # fmt: skip
KERNELS: Final = {
    "product": {"_gemm_gelu_kernel"},
    "gated_product": {"_gemm_gelu_kernel"},
    "rowwise": {"_add_norm_kernel", "_embed_kernel", "_mean_kernel"},
    "rotary": {"_short_kernel", "_rotate_keys_kernel", "_long_kernel"},
    "alibi": {"_short_kernel", "_long_kernel"},
}

_ALWAYS: Final = 90  # compiled for on every change
_SERIALIZED: Final = (
    "wgmma.mma_async instructions are serialized"  # ptxas, of products that wait for each other
)


def _compile(capability: int, cache: Path) -> tuple[list[dict[str, Any]], str]:
    """What `compile_offline.py` says of each kernel, and the log of ptxas."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, _SCRIPT, str(capability), str(SHARED_MEMORY[capability]), *VARIANTS[capability]],
        env=environment | {"TRITON_CACHE_DIR": str(cache), "TRITON_DUMP_PTXAS_LOG": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    log = "\n".join(line for line in lines if not line.startswith("{"))
    return [json.loads(line) for line in lines if line.startswith("{")], log


@pytest.mark.timeout(2 * _TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(capability, marks=() if capability == _ALWAYS else pytest.mark.slow)
        for capability in VARIANTS
    ],
)
def test_kernels_fit_a_device_and_serve_any_number_of_tokens(capability: int, tmp_path: Path) -> None:
    found: dict[str, set[tuple[str, str]]] = {variant: set() for variant in VARIANTS[capability]}
    kernels, log = _compile(capability, tmp_path)
    assert "registers" in log
    assert _SERIALIZED not in log
    for kernel in kernels:
        found[kernel["variant"]].add((kernel["kernel"], kernel["hash"]))
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        assert kernel["spilled"] <= MAX_SPILLED, kernel
    for variant, compiled in found.items():
        assert sorted(name for name, _ in compiled) == sorted(
            KERNELS[variant.removeprefix("fp8_").split(":")[0]]
        )
