"""The Triton kernels on the CPU, in Triton's interpreter, against plain torch in fp64."""

import ctypes
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the compiled kernels", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/conftest.py switches the interpreter on", allow_module_level=True)

import triton
import triton.language as tl

from tests.kernel_checks import (
    bounds_of,
    check_add_norm,
    check_attention,
    check_attention_in_fp8,
    check_batch_mates,
    check_embedding,
    check_fp8_product,
    check_product,
    check_segment_mean,
    random,
    relative_error,
)
from virnuc_core.models.attention import ReferenceAttention, apply_rotary, rotary_table
from virnuc_core.models.kernels import attention, gemm_gelu

LENGTHS = [300, 257, 193, 192, 129, 128, 64, 65, 3, 1]
CU_SEQLENS = bounds_of(LENGTHS)
each_scheme = pytest.mark.parametrize("positions", ["rotary", "alibi"])


@pytest.mark.parametrize("head_dim", [12, 16, 64])
@each_scheme
def test_attention_equals_the_reference(positions: str, head_dim: int) -> None:
    check_attention(LENGTHS, positions, head_dim)


def test_an_operator_does_not_import_the_compiler_of_torch() -> None:
    """It would take seconds of the first call."""
    program = """
import sys, torch
from virnuc_core.models.kernels import rowwise
table, bounds = torch.ones(4, 8), torch.tensor([0, 3], dtype=torch.int32)
with torch.inference_mode():
    print(torch.ops.virnuc.embed_tokens(torch.arange(3), bounds, table, 3, 1.0).sum().item())
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["24.0", "[]"]


def test_the_compiler_of_torch_knows_the_shapes_of_results() -> None:
    wide, row = torch.ones(3, 2, 2, 8), torch.ones(16)
    tiles = torch.empty(0, 4, dtype=torch.int32)
    checks = {
        "add_norm": (wide.view(3, 32), None, wide.view(3, 32), row, row, 1e-5, True, False, True),
        "linear_gelu": (torch.ones(3, 16), torch.ones(8, 16), None, True),
        "packed_attention": (wide.reshape(2, 3, 2, 8), tiles, tiles, None, row[:2]),
    }
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        results = {name: getattr(torch.ops.virnuc, name)(*args) for name, args in checks.items()}
    assert [part.shape for part in results["add_norm"]] == [(3, 32), (0, 32), (3, 32), (3, 1)]
    assert results["linear_gelu"].shape == (3, 4)
    assert results["packed_attention"].shape == (2, 16)


@each_scheme
def test_a_sequence_gets_the_same_bits_in_any_batch(positions: str) -> None:
    check_batch_mates([300, 65, 193, 1, 192], positions)


@each_scheme
def test_attention_with_the_shared_memory_of_a_smaller_device(
    monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    """It takes a sequence step by step, and where even its keys do not fit, they are loaded again."""
    monkeypatch.setattr(attention, "shared_memory", lambda device: 101_376)
    assert not attention.programs_that_fit(128, 101_376)
    for head_dim in (64, 128):
        check_attention(LENGTHS, positions, head_dim)


def test_keys_and_products_take_the_shared_memory_there_is() -> None:
    fitting = (
        (128, 166_912, 1),
        (128, 101_376, 0),
        (64, 101_376, 1),
        (64, 166_912, 2),
        (64, 232_448, 4),
        (16, 101_376, 3),
        (16, 28_672, 1),
        (16, 28_671, 0),
    )
    for head_dim, shared_memory, programs in fitting:
        assert attention.programs_that_fit(head_dim, shared_memory) == programs
    limits = [attention.register_limit(programs) for programs in range(6)]
    assert limits == [{}, {}, {}, {"maxnreg": 168}, {"maxnreg": 128}, {"maxnreg": 128}]
    for dtype in (torch.float16, torch.float8_e4m3fn):
        assert gemm_gelu.choose_tiles(232_448, dtype).tma
        for shared_memory in (166_912, 101_376):
            assert not gemm_gelu.choose_tiles(shared_memory, dtype).tma


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shared_memory", [101_376, 232_448])
@pytest.mark.parametrize(("num_tokens", "depth", "width"), [(1, 40, 8), (131, 72, 200), (128, 64, 256)])
def test_product_with_activation(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, depth: int, width: int, shared_memory: int, gated: bool
) -> None:
    monkeypatch.setattr(gemm_gelu, "shared_memory", lambda device: shared_memory)
    check_product(num_tokens, depth, width, gated=gated)


def _sparse(path: Path, *shape: int) -> torch.Tensor:
    """fp16 zeros of any size: only written pages take memory.

    2^31 elements precede the first one, so that a wrapped offset stays inside the buffer.
    """
    before, size = 2 * 2**31, 2 * math.prod(shape)
    with path.open("w+b") as file:
        file.truncate(before + size)
        memory = mmap.mmap(file.fileno(), before + size)
    memory.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(memory, dtype=torch.float16, offset=before).view(shape)


def _start(tensor: torch.Tensor) -> torch.Tensor:
    """Only the pointer: the interpreter copies a tensor's whole storage."""
    pointer = (ctypes.c_uint16 * 1).from_address(tensor.data_ptr())
    return torch.frombuffer(pointer, dtype=torch.float16)


def test_offsets_beyond_int32(tmp_path: Path) -> None:
    """One head of a sequence whose last rows are 2^31 elements after its first, in all buffers."""
    length, num_heads, head_dim = 300, 2**17, 64
    first_query = 256
    qkv = _sparse(tmp_path / "qkv", length, 3, num_heads, head_dim)
    out, rotated = (_sparse(tmp_path / name, length, num_heads, head_dim) for name in ("out", "rotated"))
    assert first_query * out.stride(0) == 2**31
    qkv[:, :, 0] = random(length, 3, head_dim)
    tile = torch.tensor([[0, length, first_query]], dtype=torch.int32)
    dims = (num_heads, head_dim, head_dim, attention.BLOCK)

    slopes = torch.full((num_heads,), 0.1)
    scale = head_dim**-0.5 * math.log2(math.e)
    attention._long_kernel[(1,)](
        *map(_start, (qkv, qkv[:, 1], out)), tile, None, slopes, scale, *dims, qkv.stride(0), False
    )
    expected = ReferenceAttention((length,), None, slopes[:1])(qkv[:, :, :1])[first_query:]
    assert relative_error(out[first_query:, 0], expected) < 1e-3

    table = rotary_table(head_dim, torch.arange(320))
    attention._rotate_keys_kernel[(1,)](*map(_start, (qkv, rotated)), tile, table, *dims, 1)
    expected = apply_rotary(qkv[first_query:, 1, 0], table[first_query:length])
    assert relative_error(rotated[first_query:, 0], expected) < 1e-3


def test_every_token_is_in_one_tile() -> None:
    short, long = attention.plan_tiles(CU_SEQLENS)
    covered = np.zeros(CU_SEQLENS[-1], int)
    for begin, length, _ in short:
        covered[begin : begin + length] += 1
    for begin, length, first in long:
        covered[begin + first : begin + min(length, first + attention.BLOCK)] += 1
    assert (covered == 1).all()
    assert short[:, 1].max() <= attention.RESIDENT_TOKENS < long[:, 1].min()
    for bounds in ([0, 5], [0, 400], [0, 7, 207]):  # a list of one tile would be compiled for alone
        assert min(len(part) for part in attention.plan_tiles(np.array(bounds, np.int32))) >= 2


@pytest.mark.parametrize("width", [48, 320, 1280])
@pytest.mark.parametrize("has_branch", [True, False])
def test_add_norm_equals_layer_norm_of_the_sum(width: int, has_branch: bool) -> None:
    check_add_norm(9, width, has_branch=has_branch)


@triton.jit
def _gelu_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + at, gemm_gelu._gelu(tl.load(x + at)))


def test_gelu_is_the_erf_form() -> None:
    x = torch.linspace(-12, 12, 4096)
    values = torch.empty_like(x)
    _gelu_kernel[(1,)](x, values, len(x))
    expected = functional.gelu(x.double())
    error = (values.double() - expected).abs()
    assert float(error.max()) < 1.5e-6
    assert float((error / expected.abs())[(x > -3) & (x != 0)].max()) < 2e-4


@each_scheme
def test_attention_in_fp8(positions: str) -> None:
    check_attention_in_fp8(LENGTHS, positions)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shared_memory", [101_376, 232_448])
def test_fp8_product_with_activation(
    monkeypatch: pytest.MonkeyPatch, shared_memory: int, gated: bool
) -> None:
    monkeypatch.setattr(gemm_gelu, "_tanh", _tanh)  # the interpreter has no instructions of a GPU
    monkeypatch.setattr(gemm_gelu, "shared_memory", lambda device: shared_memory)
    check_fp8_product(gated, 150, 320, 336)


@pytest.mark.parametrize("specials", [True, False])
def test_segment_mean_equals_mean_pool(specials: bool) -> None:
    check_segment_mean(random(sum(LENGTHS), 72), LENGTHS, specials)


@pytest.mark.parametrize("width", [48, 320])
def test_embeddings_make_up_for_masked_tokens(width: int) -> None:
    check_embedding(LENGTHS, width)
