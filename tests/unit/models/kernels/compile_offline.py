"""Compiles kernels as their operators launch them, for a GPU that is not present.

    python compile_offline.py CAPABILITY SHARED_MEMORY VARIANT...

A variant is product:DTYPE, gated_product:DTYPE, rowwise:WIDTH:DTYPE, or POSITIONS:HEAD_DIM:DTYPE for attention, each but
rowwise also with fp8_ before it. Prints a JSON line per launch: variant, name of the kernel, bytes of shared memory,
bytes of registers that a thread spills, and hash of the code.
"""

import json
import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from virnuc_core.models.kernels import attention, gemm_gelu, rowwise

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
    tiles = [torch.from_numpy(part) for part in attention.plan_tiles(np.array(LENGTHS, np.int32))]
    table, slopes = torch.zeros(1024, attention.padded_head_dim(head_dim) // 2, 2), torch.zeros(HEADS)
    rotary = positions == "rotary"
    qkv = torch.zeros(LENGTHS[-1], 3, HEADS, head_dim, dtype=dtype)
    positions_of_tokens = (table, None) if rotary else (None, slopes)
    attention.packed_attention(qkv, *tiles, *positions_of_tokens, quantize)


def multiply(gated: bool, dtype: torch.dtype) -> None:
    weight = torch.zeros(1280, 320, dtype=dtype)
    for num_tokens in NUM_TOKENS:
        x = torch.zeros(num_tokens, 320, dtype=dtype)
        gemm_gelu.linear_gelu(x, weight, None if gated else weight[:, 0].contiguous(), gated)


def multiply_fp8(gated: bool, dtype: torch.dtype) -> None:
    weight = torch.zeros(1280, 320, dtype=torch.float8_e4m3fn)
    bias = None if gated else torch.zeros(1280, dtype=dtype)
    for num_tokens in NUM_TOKENS:
        x = torch.zeros(num_tokens, 320, dtype=torch.float8_e4m3fn)
        scales = torch.ones(num_tokens, 1), torch.ones(1, 1280), torch.ones(1, 1)
        gemm_gelu.fp8_linear_gelu(x, scales[0], weight, scales[1], bias, gated, scales[2])


def work_on_rows(dtype: torch.dtype, quantize: bool, width: int) -> None:
    weight = torch.zeros(width, dtype=dtype)
    for num_tokens in NUM_TOKENS:
        x = torch.zeros(num_tokens, width, dtype=dtype)
        rowwise.add_norm(x, weight, x, weight, weight, 1e-5, True, True, quantize)
        bounds = torch.tensor([0, 3, num_tokens], dtype=torch.int32)
        rowwise.segment_mean(x, bounds, True)
        rowwise.embed_tokens(torch.zeros(num_tokens, dtype=torch.int32), bounds, x, 32, 0.88)


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


def main() -> None:
    capability, limit = int(sys.argv[1]), int(sys.argv[2])
    driver.set_active(OfflineDriver(capability))
    attention.shared_memory = gemm_gelu.shared_memory = lambda device: limit
    compile_or_launch = JITFunction.run
    variant = ""

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = compile_or_launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        facts = {"variant": variant, "kernel": kernel.__name__, "shared": compiled.metadata.shared}
        facts |= {"spilled": spilled_bytes(compiled.asm["cubin"]), "hash": compiled.hash}
        print(json.dumps(facts), flush=True)

    JITFunction.run = compile_only
    for variant in sys.argv[3:]:
        kind, *size, dtype_name = variant.removeprefix("fp8_").split(":")
        dtype = getattr(torch, dtype_name)
        in_fp8 = variant.startswith("fp8_")
        if kind == "rowwise":
            work_on_rows(dtype, capability >= 89, int(size[0]))
        elif kind in ("product", "gated_product"):
            (multiply_fp8 if in_fp8 else multiply)(kind == "gated_product", dtype)
        else:
            attend(kind, int(size[0]), dtype, quantize=in_fp8)


if __name__ == "__main__":
    main()
