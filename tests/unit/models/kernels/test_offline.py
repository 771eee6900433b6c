"""The kernels compiled for GPUs that are not present, within the shared memory of each."""

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

# Heads of up to 32 columns are padded to 32. 8.0, 8.6 and 8.9 get the same code but for the size of their
# shared memory, so they share out what positions and dtypes add.
VARIANTS: Final = {
    80: ["rowwise:bfloat16", "rotary:128:float16", "alibi:64:bfloat16", "rotary:24:bfloat16"],
    86: ["rotary:128:bfloat16", "rotary:16:float16"],
    89: ["rowwise:bfloat16", "alibi:128:float16", "rotary:64:float16", "fp8_alibi:64:bfloat16"],
    90: ["rowwise:float16", "product:float16", "gated_product:bfloat16", "fp8_product:bfloat16", "fp8_gated_product:bfloat16", "rotary:128:float16", "alibi:64:bfloat16", "rotary:32:float16", "fp8_rotary:64:bfloat16"],
    100: ["product:bfloat16", "gated_product:float16", "fp8_product:bfloat16", "rotary:128:bfloat16", "alibi:64:float16"],
    120: ["rowwise:float16", "product:float16", "gated_product:bfloat16", "fp8_product:bfloat16", "fp8_gated_product:bfloat16", "rotary:128:float16", "alibi:64:float16"],
}  # fmt: skip
KERNELS: Final = {
    "product": {"_gemm_gelu_kernel"},
    "gated_product": {"_gemm_gelu_kernel"},
    "rowwise": {"_add_norm_kernel", "_gelu_quantize_kernel", "_mean_kernel"},
    "rotary": {"_short_kernel", "_rotate_keys_kernel", "_long_kernel"},
    "alibi": {"_short_kernel", "_long_kernel"},
}

_ALWAYS: Final = 90  # compiled for on every change


def _compile(capability: int, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, _SCRIPT, str(capability), str(SHARED_MEMORY[capability]), *VARIANTS[capability]],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(2 * _TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(capability, marks=() if capability == _ALWAYS else pytest.mark.slow)
        for capability in VARIANTS
    ],
)
def test_kernels_fit_in_shared_memory_and_serve_any_number_of_tokens(capability: int, tmp_path: Path) -> None:
    found: dict[str, set[tuple[str, str]]] = {variant: set() for variant in VARIANTS[capability]}
    for kernel in _compile(capability, tmp_path):
        found[kernel["variant"]].add((kernel["kernel"], kernel["hash"]))
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
    for variant, compiled in found.items():
        assert sorted(name for name, _ in compiled) == sorted(
            KERNELS[variant.removeprefix("fp8_").split(":")[0]]
        )
