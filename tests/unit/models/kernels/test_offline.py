"""The kernels compiled for GPUs that are not present, within the shared memory and the registers of each.

As a program, `test_offline.py CAPABILITY` prints a JSON line for each launch of a kernel: variant, name of the
kernel, bytes of shared memory, bytes of registers that a thread spills, and hash of the code.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from virnuc_core.models.kernels import attention, gemm_gelu, rowwise

# Maximum shared memory per block in bytes, by compute capability.
SHARED_MEMORY: Final = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}

MAX_SPILLED: Final = 500  # bytes a thread: heads of 128 columns with ALiBi, on 8.9

# Of each capability: product:DTYPE, gated_product:DTYPE, rowwise:WIDTH:DTYPE, or POSITIONS:HEAD_DIM:DTYPE for attention, also
# with fp8_ before it. Heads of 24 columns are padded to 32; rows of 320 to 5120 columns are those of ESM-2 8M to 15B. 8.0, 8.6
# and 8.9 get the same code but for the size of their shared memory, so they share out dtypes and sizes.
VARIANTS: Final = {
    80: ["rowwise:5120:bfloat16", "product:float16", "gated_product:bfloat16",
         "rotary:128:float16", "alibi:64:bfloat16", "rotary:24:bfloat16"],
    86: ["rowwise:1280:float16", "product:bfloat16", "gated_product:float16",
         "rotary:128:bfloat16", "alibi:64:float16", "rotary:16:float16"],
    89: ["rowwise:5120:bfloat16", "rowwise:320:float16", "product:float16", "gated_product:float16",
         "alibi:128:float16", "alibi:64:float16", "rotary:64:float16"],
    90: ["rowwise:5120:float16", "rowwise:480:bfloat16", "norms:480:bfloat16", "fp8_norms:5120:bfloat16",
         "rotary:128:float16", "alibi:64:bfloat16", "rotary:32:float16", "fp8_rotary:64:bfloat16"],
    100: ["rowwise:2560:float16", "product:bfloat16", "gated_product:float16",
          "rotary:128:bfloat16", "alibi:64:float16"],
    120: ["rowwise:5120:float16", "rowwise:768:float16", "product:float16", "gated_product:bfloat16",
          "rotary:128:float16", "rotary:64:bfloat16", "alibi:64:float16"],
}  # fmt: skip
KERNELS: Final = {  # and for attention, _whole_kernel where a device takes whole sequences
    "product": ["_gemm_gelu_kernel"],
    "gated_product": ["_gemm_gelu_kernel"],
    "rowwise": ["_add_norm_kernel", "_embed_kernel", "_mean_kernel"],
    "norms": ["_norm_factors_kernel"] * 2,  # of values, and of sums of parts of them
    "rotary": ["_rotate_keys_kernel", "_tile_kernel"],
    "alibi": ["_tile_kernel"],
}


HEADS = 20
NUM_TOKENS = (64, 65)  # Triton compiles arguments that are multiples of 16 apart, unless it is told not to
LENGTHS = [0, 10, 20, 30, 300, 600, 900]  # cu_seqlens of three short and three long sequences


class OfflineDriver:
    """The part of a driver that Triton queries before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def attend(positions: str, head_dim: int, dtype: torch.dtype, quantize: bool) -> None:
    whole = attention.takes_whole_sequences(torch.device("cpu"), head_dim)
    planned = attention.plan_tiles(np.array(LENGTHS, np.int32), whole=whole)
    tiles = tuple(torch.from_numpy(part) for part in planned)
    table, slopes = torch.zeros(1024, attention.padded_head_dim(head_dim) // 2, 2), torch.zeros(HEADS)
    rotary = positions == "rotary"
    qkv = torch.zeros(LENGTHS[-1], 3, HEADS, head_dim, dtype=dtype)
    positions_of_tokens = (table, None) if rotary else (None, slopes)
    attention.packed_attention(qkv, tiles, *positions_of_tokens, quantize)


def multiply(gated: bool, dtype: torch.dtype) -> None:
    weight = torch.zeros(1280, 320, dtype=dtype)
    bias = None if gated else torch.zeros(1280, dtype=dtype)
    for num_tokens in NUM_TOKENS:
        gemm_gelu.linear_gelu(torch.zeros(num_tokens, 320, dtype=dtype), weight, bias)


def work_on_rows(dtype: torch.dtype, width: int) -> None:
    weight = torch.zeros(width, dtype=dtype)
    for num_tokens in NUM_TOKENS:
        x = torch.zeros(num_tokens, width, dtype=dtype)
        rowwise.add_norm(x, x, weight, weight, 1e-5, post_norm=False)
        bounds = torch.tensor([0, 3, num_tokens], dtype=torch.int32)
        rowwise.segment_mean(x, bounds, True)
        rowwise.embed_tokens(torch.zeros(num_tokens, dtype=torch.int32), bounds, x, 32, 0.88)


def factor_norms(dtype: torch.dtype, in_fp8: bool, width: int) -> None:
    for num_tokens in NUM_TOKENS:
        scale = torch.zeros(1, num_tokens) if in_fp8 else None
        rowwise.norm_factors(torch.zeros(num_tokens, width, dtype=dtype), None, width, 1e-5, scale=scale)
        parts = torch.zeros(num_tokens, 8)
        rowwise.norm_factors(parts, parts, width, 1e-5, scale=scale)


def spilled_bytes(cubin: bytes) -> int:
    """Local memory of a thread."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    return int(found[1]) + int(found[2])


def compile_all(capability: int) -> None:
    driver.set_active(OfflineDriver(capability))
    attention.shared_memory = lambda device: SHARED_MEMORY[capability]
    compile_or_launch = JITFunction.run
    variant = ""

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = compile_or_launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        facts = {"variant": variant, "kernel": kernel.__name__, "shared": compiled.metadata.shared}
        facts |= {"spilled": spilled_bytes(compiled.asm["cubin"]), "hash": compiled.hash}
        print(json.dumps(facts), flush=True)

    JITFunction.run = compile_only
    for variant in VARIANTS[capability]:
        kind, *size, dtype_name = variant.removeprefix("fp8_").split(":")
        dtype = getattr(torch, dtype_name)
        in_fp8 = variant.startswith("fp8_")
        if kind == "rowwise":
            work_on_rows(dtype, int(size[0]))
        elif kind == "norms":
            factor_norms(dtype, in_fp8, int(size[0]))
        elif kind in ("product", "gated_product"):
            multiply(kind == "gated_product", dtype)
        else:
            attend(kind, int(size[0]), dtype, quantize=in_fp8)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "capability",
    # One is compiled for on every change.
    [pytest.param(each, marks=() if each == 90 else pytest.mark.slow) for each in VARIANTS],
)
def test_kernels_fit_a_device_and_serve_any_number_of_tokens(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert "registers" in done.stdout
    # ptxas says so of products that wait for each other.
    assert "wgmma.mma_async instructions are serialized" not in done.stdout
    found: dict[str, set[tuple[str, str]]] = {variant: set() for variant in VARIANTS[capability]}
    for kernel in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
        found[kernel["variant"]].add((kernel["kernel"], kernel["hash"]))
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        assert kernel["spilled"] <= MAX_SPILLED, kernel
    for variant, compiled in found.items():
        kind, size, *_ = variant.removeprefix("fp8_").split(":")
        takes_whole = kind in ("rotary", "alibi") and capability in (90, 100) and int(size) <= 64
        expected = KERNELS[kind] + ["_whole_kernel"] * takes_whole
        assert sorted(name for name, _ in compiled) == sorted(expected), variant


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
