"""The Triton kernels on the CPU, in Triton's interpreter, against plain torch in fp64."""

import ctypes
import math
import mmap
import os
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

from virnuc_core.models.attention_plain import ReferenceAttention
from virnuc_core.models.encoder import mean_pool
from virnuc_core.models.kernels import attention, gemm_gelu, rowwise
from virnuc_core.models.positions import alibi_slopes, apply_rotary, position_ids, rotary_table

# The interpreter truncates to fp8 where a device rounds.
FP8_ERROR = 0.08
LENGTHS = [300, 193, 192, 129, 128, 64, 65, 3, 1]
CU_SEQLENS = np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int32)


def _bounds() -> torch.Tensor:
    return torch.from_numpy(CU_SEQLENS)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("head_dim", [12, 16, 64])
@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_attention_equals_the_reference(positions: str, head_dim: int) -> None:
    num_tokens, num_heads = sum(LENGTHS), 3
    qkv = _random(num_tokens, 3, num_heads, head_dim)
    table, cos_sin, slopes = None, None, None
    if positions == "rotary":
        table = rotary_table(head_dim, position_ids(_bounds(), num_tokens))
        padding = (attention.padded_head_dim(head_dim) - head_dim) // 2
        cos_sin = functional.pad(rotary_table(head_dim, torch.arange(320)), (0, 0, 0, padding))
    else:
        slopes = alibi_slopes(num_heads)
    tiles = [torch.from_numpy(part) for part in attention.plan_tiles(CU_SEQLENS)]
    actual = attention.packed_attention(qkv, *tiles, cos_sin, slopes)
    expected = ReferenceAttention(tuple(LENGTHS), table, slopes)(qkv)
    assert bool(actual.isfinite().all())
    assert _relative_error(actual, expected) < 1e-3


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_attention_streams_keys_that_do_not_fit_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    monkeypatch.setattr(attention, "shared_memory", lambda device: 101_376)
    assert not attention.fits_resident(128, 101_376)
    test_attention_equals_the_reference(positions, 128)


def test_keys_and_products_take_the_shared_memory_there_is() -> None:
    fitting = (
        (128, 166_912, True),
        (128, 101_376, False),
        (64, 101_376, True),
        (16, 28_672, True),
        (16, 28_671, False),
    )
    for head_dim, shared_memory, fits in fitting:
        assert attention.fits_resident(head_dim, shared_memory) == fits
    assert gemm_gelu.choose_tiles(232_448) == gemm_gelu.Tiles(128, 256, 64, 3)
    assert gemm_gelu.choose_tiles(101_376) == gemm_gelu.Tiles(128, 128, 64, 3)


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
    qkv[:, :, 0] = _random(length, 3, head_dim)
    tile = torch.tensor([[0, length, first_query]], dtype=torch.int32)
    dims = (num_heads, head_dim, head_dim, attention.BLOCK)

    slopes = torch.full((num_heads,), 0.1)
    scale = head_dim**-0.5 * math.log2(math.e)
    attention._long_kernel[(1,)](
        *map(_start, (qkv, qkv[:, 1], out)), tile, None, slopes, scale, *dims, qkv.stride(0), False
    )
    expected = ReferenceAttention((length,), None, slopes[:1])(qkv[:, :, :1])[first_query:]
    assert _relative_error(out[first_query:, 0], expected) < 1e-3

    table = rotary_table(head_dim, torch.arange(320))
    attention._rotate_keys_kernel[(1,)](*map(_start, (qkv, rotated)), tile, table, *dims, 1)
    expected = apply_rotary(qkv[first_query:, 1, 0], table[first_query:length])
    assert _relative_error(rotated[first_query:, 0], expected) < 1e-3


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
    residual, branch = _random(9, width), _random(9, width, seed=1)
    bias, gain, shift = (_random(width, seed=seed) for seed in (2, 3, 4))
    added = (branch, bias) if has_branch else (None, None)
    total, normed, values, scale = rowwise.add_norm(*added, residual, gain, shift, 1e-5, True, True, True)
    wanted = residual.double() + ((branch.double() + bias.double()) if has_branch else 0.0)
    assert _relative_error(total, wanted) < 1e-3
    wanted = functional.layer_norm(wanted, (width,), gain.double(), shift.double(), 1e-5)
    assert _relative_error(normed, wanted) < 1e-3
    assert _relative_error(values.float() * scale, wanted) < FP8_ERROR
    assert bool((values.float().abs().amax(1) == 448).all())
    kept = rowwise.add_norm(*added, residual, gain, shift, 1e-5, False, True, False)
    assert [tensor.numel() for tensor in kept] == [0, 9 * width, 0, 0]


def test_gelu_is_the_erf_form() -> None:
    x = torch.linspace(-12, 12, 4001).view(1, -1)
    values, _ = rowwise.gelu_quantize(x, None, "gelu", False)
    expected = functional.gelu(x.double())
    error = (values.double() - expected).abs()
    assert float(error.max()) < 1.5e-6
    assert float((error / expected.abs())[(x > -3) & (x != 0)].max()) < 2e-4


@pytest.mark.parametrize("width", [48, 1024, 1920])
def test_activations_with_bias_gate_and_fp8(width: int) -> None:
    x, bias = _random(5, 2 * width), _random(width, seed=1)
    plain, gate = x[:, :width].contiguous(), functional.gelu(x[:, :width].double())
    gelu, _ = rowwise.gelu_quantize(plain, bias, "gelu", False)
    assert _relative_error(gelu, functional.gelu(plain.double() + bias.double())) < 1e-3
    gated, _ = rowwise.gelu_quantize(x, None, "gated_gelu", False)
    assert _relative_error(gated, gate * x[:, width:].double()) < 1e-3
    for activation, expected in (("none", plain), ("gelu", gate), ("gated_gelu", gated)):
        values, scale = rowwise.gelu_quantize(
            x if activation == "gated_gelu" else plain, None, activation, True
        )
        assert (values.dtype, values.shape, scale.shape) == (torch.float8_e4m3fn, (5, width), (5, 1))
        assert _relative_error(values.float() * scale, expected) < FP8_ERROR


@pytest.mark.parametrize("specials", [True, False])
def test_segment_mean_equals_mean_pool(specials: bool) -> None:
    hidden = _random(sum(LENGTHS), 72)
    actual = rowwise.segment_mean(hidden, _bounds(), specials)
    torch.testing.assert_close(
        actual, mean_pool(hidden, _bounds(), include_special_tokens=specials), rtol=1e-5, atol=1e-6
    )
