"""The Triton kernels against plain torch in fp64: compiled on a GPU, and in Triton's interpreter on the CPU."""

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from virnuc_core.models.attention import (
    PackedLayout,
    ReferenceAttention,
    alibi_slopes,
    apply_rotary,
    packed_attention,
    position_ids,
    rotary_table,
)
from virnuc_core.models.encoders import mean_pool
from virnuc_core.models.kernels import attention, gemm_gelu, rowwise
from virnuc_core.specs import AttentionBackend
from virnuc_core.versions import FLASH_ATTN, FLASH_ATTN_VERSION, installed_version

ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/conftest.py switches the interpreter on", allow_module_level=True)
pytestmark = [pytest.mark.gpu] if ON_GPU else []
on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="takes the memory of a GPU")
interpreted = pytest.mark.skipif(ON_GPU, reason="for the interpreter")
in_fp8 = pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability() < (8, 9), reason="Ada and later")
has_flash_attn = ON_GPU and installed_version(FLASH_ATTN) == FLASH_ATTN_VERSION

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ERROR = {torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
# The interpreter truncates to fp8 where a device rounds.
FP8_ERROR = 0.04 if ON_GPU else 0.12

LENGTHS = {"mixed": [300, 257, 193, 192, 129, 128, 64, 65, 3, 1]}
HEADS, WIDTHS = [(12, torch.float16), (16, torch.float16), (64, torch.float16)], [48, 320, 1280]
PRODUCTS = [(1, 40, 8), (131, 72, 200), (128, 64, 256)]
if ON_GPU:
    LENGTHS = {
        "one token": [1],
        "around the borders": [
            *(1, 2, 15, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 1, 1024)
        ],
        "equal": [168] * 50,
        "mixed": [*range(1, 1_100, 37), 383, 384, 385, 448, 449, 511, 512, 513, 640, 641, 1_100],
        "long": [10_000, 30, 3_001],
        "very long": [40_000],
    }
    HEADS = [(width, torch.float16) for width in (16, 24, 32, 64, 128)]
    HEADS += [(width, torch.bfloat16) for width in (64, 128)]
    WIDTHS = [256, 320, 768, 1280, 2560, 5120]
    sizes = [(256, 1024), (320, 1280), (768, 3072), (1280, 5120), (72, 200)]
    PRODUCTS = [(tokens, *size) for tokens in (3, 128, 1000) for size in sizes]

each_scheme = pytest.mark.parametrize("positions", ["rotary", "alibi"])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)


def bounds_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def attend(
    qkv: torch.Tensor,
    lengths: list[int],
    backend: AttentionBackend,
    positions: str,
    *,
    quantize: bool = False,
) -> torch.Tensor:
    _, _, heads, head_dim = qkv.shape
    layout = PackedLayout.build(
        bounds_of(lengths),
        backend=backend,
        device=DEVICE,
        dtype=qkv.dtype,
        head_dim=head_dim,
        alibi_heads=heads if positions == "alibi" else None,
    )
    return packed_attention(qkv.clone(), layout, quantize=quantize)  # it overwrites keys


def reference(qkv: torch.Tensor, lengths: list[int], positions: str) -> torch.Tensor:
    bounds = torch.from_numpy(bounds_of(lengths)).to(DEVICE)
    table, slopes = None, None
    if positions == "rotary":
        table = rotary_table(qkv.shape[3], position_ids(bounds, sum(lengths)))
    else:
        slopes = alibi_slopes(qkv.shape[2]).to(DEVICE)
    return ReferenceAttention(tuple(lengths), table, slopes)(qkv.float())


@pytest.mark.parametrize("backend", ["triton"] + ["sdpa"] * ON_GPU + ["flash-attn"] * has_flash_attn)
@each_scheme
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("head_dim", "dtype"), HEADS)
@pytest.mark.filterwarnings("ignore")  # of the compiler that flash-attn brings
def test_attention_equals_the_reference(
    head_dim: int, dtype: torch.dtype, lengths: list[int], positions: str, backend: AttentionBackend
) -> None:
    qkv = random(sum(lengths), 3, 3, head_dim, dtype=dtype)
    actual = attend(qkv, lengths, backend, positions)
    assert actual.dtype == dtype
    assert bool(actual.isfinite().all())
    # Only virnuc's kernels rotate in fp32; others round the rotated queries and keys.
    tolerance = ERROR[dtype] * (1 if backend == "triton" else 2)
    assert relative_error(actual, reference(qkv, lengths, positions)) < tolerance


@each_scheme
def test_a_sequence_gets_the_same_bits_in_any_batch(positions: str) -> None:
    lengths = [300, 65, 193, 1, 192, *range(1, 1_100, 37)] if ON_GPU else [300, 65, 193, 1, 192]
    qkv = random(sum(lengths), 3, 3, 64)
    together = attend(qkv, lengths, "triton", positions).split(lengths)
    for length, own_qkv, expected in zip(lengths, qkv.split(lengths), together, strict=True):
        assert torch.equal(attend(own_qkv, [length], "triton", positions), expected), length


@each_scheme
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_with_the_shared_memory_of_a_smaller_device(
    monkeypatch: pytest.MonkeyPatch, positions: str, head_dim: int
) -> None:
    """It cuts short sequences into tiles, too."""
    monkeypatch.setattr(attention, "shared_memory", lambda device: 101_376)
    lengths = LENGTHS["mixed"]
    qkv = random(sum(lengths), 3, 3, head_dim)
    expected = reference(qkv, lengths, positions)
    assert relative_error(attend(qkv, lengths, "triton", positions), expected) < ERROR[torch.float16]


@in_fp8
@each_scheme
def test_attention_in_fp8(positions: str) -> None:
    lengths = LENGTHS["mixed"]
    qkv = random(sum(lengths), 3, 3, 64, dtype=torch.bfloat16 if ON_GPU else torch.float16)
    qkv[:, 2] *= 100
    actual = attend(qkv, lengths, "triton", positions, quantize=True)
    assert actual.dtype == torch.float8_e4m3fn
    assert relative_error(actual, reference(qkv, lengths, positions)) < FP8_ERROR


def activated(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """GELU of a product; without a bias, gated: its columns are gates and values in turn."""
    if bias is None:
        return functional.gelu(product[:, 0::2]) * product[:, 1::2]
    return functional.gelu(product + bias)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("num_tokens", "depth", "width"), PRODUCTS)
def test_product_with_activation(num_tokens: int, depth: int, width: int, gated: bool) -> None:
    x, weight = random(num_tokens, depth), random(2 * width if gated else width, depth, seed=1) * 0.02
    bias = None if gated else random(width, seed=2)
    actual = gemm_gelu.linear_gelu(x, weight, bias)
    assert actual.shape == (num_tokens, width)
    assert relative_error(actual, activated(x.double() @ weight.double().T, bias)) < ERROR[torch.float16]


@on_a_gpu
def test_product_beyond_int32_offsets() -> None:
    """The result has more than 2^31 elements; its last rows equal those of a small product."""
    weight, bias = random(20_480, 16, seed=1), random(20_480, seed=2)
    x = random(106_000, 16)
    whole = gemm_gelu.linear_gelu(x, weight, bias)
    assert torch.equal(whole[-128:], gemm_gelu.linear_gelu(x[-128:], weight, bias))


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


@interpreted
@each_scheme
def test_offsets_beyond_int32(positions: str, tmp_path: Path) -> None:
    """One head of a sequence whose last rows are 2^31 elements after its first, in all buffers."""
    length, num_heads, head_dim = 300, 2**17, 64
    first_query = 256
    qkv = _sparse(tmp_path / "qkv", length, 3, num_heads, head_dim)
    out = _sparse(tmp_path / "out", length, num_heads, head_dim)
    assert first_query * out.stride(0) == 2**31
    qkv[:, :, 0] = own = random(length, 3, head_dim)
    tiles = torch.tensor([[0, length, first] for first in range(0, length, 64)], dtype=torch.int32)
    dims = (num_heads, head_dim, head_dim, attention.BLOCK)
    table, slopes = rotary_table(head_dim, torch.arange(320)), torch.full((num_heads,), 0.1)
    scheme = (table, None) if positions == "rotary" else (None, slopes)
    starts = tuple(map(_start, (qkv, out)))
    if positions == "rotary":
        for tile in tiles:
            attention._rotate_keys_kernel[(1,)](starts[0], tile, table, *dims, 1)
        expected = apply_rotary(own[first_query:, 1], table[first_query:length])
        assert relative_error(qkv[first_query:, 1, 0], expected) < 1e-3
    scale = head_dim**-0.5 * math.log2(math.e)
    attention._tile_kernel[(1,)](*starts, tiles[-1], *scheme, scale, *dims)
    rotary, alibi = table[:length] if scheme[0] is not None else None, scheme[1]
    own_slopes = None if alibi is None else alibi[:1]
    expected = ReferenceAttention((length,), rotary, own_slopes)(own[:, :, None])[first_query:]
    assert relative_error(out[first_query:, 0], expected) < 1e-3


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("dtype", ERROR if ON_GPU else [torch.float16])
def test_add_norm_equals_layer_norm_of_the_sum(width: int, has_branch: bool, dtype: torch.dtype) -> None:
    rows = 301 if ON_GPU else 9
    residual = random(rows, width, dtype=dtype, seed=1)
    gain, shift = (random(width, dtype=dtype, seed=seed) for seed in (3, 4))
    branch = random(rows, width, dtype=dtype) if has_branch else None
    total = residual.double() + (branch.double() if branch is not None else 0.0)
    wanted = functional.layer_norm(total, (width,), gain.double(), shift.double(), 1e-5)
    for post_norm in (True, False):
        kept, normed = rowwise.add_norm(branch, residual, gain, shift, 1e-5, post_norm=post_norm)
        assert relative_error(normed, wanted) < ERROR[dtype]
        if has_branch or post_norm:
            assert relative_error(kept, wanted if post_norm else total) < ERROR[dtype]


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_factors_come_from_sums_of_parts(width: int) -> None:
    rows, parts, eps = 301 if ON_GPU else 9, 4, 1e-5
    values = random(rows, width, dtype=torch.float32) * 3 + 1
    halves = values.unflatten(1, (parts, -1))
    exact = values.double()
    rstd = (exact.var(1, correction=0) + eps).rsqrt()
    factor, found, mean_rstd, quantized = rowwise.norm_factors(
        halves.sum(2), halves.square().sum(2), width, eps
    )
    assert factor is found
    assert quantized is None
    assert relative_error(found[0], rstd) < 1e-5
    assert relative_error(mean_rstd[0], exact.mean(1) * rstd) < 1e-5
    assert relative_error(rowwise.norm_factors(values.half(), None, width, eps)[1][0], rstd) < 1e-3


@in_fp8
def test_norm_factors_undo_the_scale_of_each_token() -> None:
    """Values without a scale are quantized; next ones get the scale of their predecessors."""
    rows, width, alpha, unit, eps = 9, 64, 3.0, 4.0, 1e-12
    values = random(rows, width) * torch.logspace(-2, 2, rows, device=DEVICE).half()[:, None]
    rstd = (values.double().var(1, correction=0) + eps).rsqrt()
    scale = torch.empty((1, rows), device=DEVICE)
    factor, _, _, quantized = rowwise.norm_factors(
        values, None, width, eps, scale=scale, alpha=alpha, unit=unit
    )
    assert quantized is not None
    assert relative_error(scale[0], unit * rstd) < 1e-3
    wanted = values.double() * (alpha * rstd)[:, None]
    assert relative_error(quantized.double() * factor.t(), wanted) < FP8_ERROR
    used, doubled = scale.clone(), (values * 2).float()
    factor, _, _, quantized = rowwise.norm_factors(
        doubled, doubled.square(), width, eps, scale=scale, alpha=alpha, unit=unit
    )
    assert quantized is None
    half = rstd / 2
    assert relative_error(factor[0], alpha * half / used[0]) < 1e-3
    assert relative_error(scale[0], unit * half) < 1e-3


@triton.jit
def _gelu_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + at, gemm_gelu._gelu(tl.load(x + at)))


@interpreted
def test_gelu_is_the_erf_form() -> None:
    x = torch.linspace(-12, 12, 4096)
    values = torch.empty_like(x)
    _gelu_kernel[(1,)](x, values, len(x))
    expected = functional.gelu(x.double())
    error = (values.double() - expected).abs()
    assert float(error.max()) < 1.5e-6
    assert float((error / expected.abs())[(x > -3) & (x != 0)].max()) < 2e-4


@on_a_gpu
def test_segment_mean_beyond_int32_offsets() -> None:
    """More sequences than the second grid dimension can hold, and a last one that ends beyond 2^31."""
    width, num_sequences = 768, 70_000
    bounds = torch.arange(num_sequences + 1, dtype=torch.int32, device=DEVICE)
    bounds[-1] = num_tokens = 2_900_000
    hidden = torch.ones(num_tokens, width, dtype=torch.float16, device=DEVICE)
    hidden[-1_000_000:] = 2.0
    with torch.inference_mode():
        means = mean_pool(hidden, bounds, include_special_tokens=True)
    assert bool((means[:-1] == 1).all())
    longest = num_tokens - num_sequences + 1
    torch.testing.assert_close(means[-1], torch.full_like(means[-1], 1 + 1_000_000 / longest))


@pytest.mark.parametrize("specials", [True, False])
def test_segment_means_are_right_and_the_same_alone_and_in_a_batch(specials: bool) -> None:
    lengths = [3, 168, 1022, 64, 5000] if ON_GPU else LENGTHS["mixed"]
    hidden = random(sum(lengths), 320 if ON_GPU else 72)

    def means_of(states: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return rowwise.segment_mean(states, bounds.to(DEVICE), specials)

    bounds = torch.from_numpy(bounds_of(lengths))
    means = means_of(hidden, bounds)
    expected = mean_pool(hidden.cpu().float(), bounds, include_special_tokens=specials)
    torch.testing.assert_close(means.cpu(), expected, rtol=1e-5, atol=1e-6)
    for mean, one in zip(means, hidden.split(lengths), strict=True):
        assert torch.equal(means_of(one, torch.tensor([0, len(one)], dtype=torch.int32))[0], mean)


@pytest.mark.parametrize("width", [48, 320])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_embeddings_make_up_for_masked_tokens(lengths: list[int], width: int) -> None:
    """Some tokens of every sequence but the first are masked."""
    table, share, mask_token = random(33, width), 0.88, 32
    bounds = torch.from_numpy(bounds_of(lengths)).to(DEVICE)
    numbers = torch.arange(sum(lengths), device=DEVICE)
    input_ids = torch.where((numbers % 3 == 0) & (numbers >= lengths[0]), mask_token, numbers % 31).int()
    embedded = rowwise.embed_tokens(input_ids, bounds, table, mask_token, share)
    is_masked = input_ids == mask_token
    observed = torch.stack([1 - part.double().mean() for part in is_masked.split(lengths)])
    scale = (share / observed).half()[torch.repeat_interleave(torch.tensor(lengths, device=DEVICE))]
    scale[is_masked] = 0
    torch.testing.assert_close(embedded, table[input_ids.long()] * scale[:, None], rtol=2e-3, atol=0)
