"""virnuc's kernels against plain torch in fp64, on a GPU or in Triton's interpreter."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional

from virnuc_core.models.attention import (
    PackedLayout,
    ReferenceAttention,
    alibi_slopes,
    packed_attention,
    position_ids,
    rotary_table,
)
from virnuc_core.models.encoders import mean_pool
from virnuc_core.models.layers import quantize_rows
from virnuc_core.specs import AttentionBackend
from virnuc_core.versions import FLASH_ATTN, FLASH_ATTN_VERSION, installed_version

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = {torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
# The interpreter truncates to fp8 where a device rounds.
FP8_ERROR = 0.04 if DEVICE.type == "cuda" else 0.09

IF_FLASH_ATTN = [
    pytest.mark.skipif(
        installed_version(FLASH_ATTN) != FLASH_ATTN_VERSION, reason=f"needs {FLASH_ATTN} {FLASH_ATTN_VERSION}"
    ),
    pytest.mark.filterwarnings("ignore"),  # of the bundled compiler
]


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
    scheme = {"rotary_head_dim": head_dim} if positions == "rotary" else {"alibi_heads": heads}
    layout = PackedLayout.build(bounds_of(lengths), backend=backend, device=DEVICE, dtype=qkv.dtype, **scheme)
    return packed_attention(qkv, layout, quantize=quantize)


def reference(qkv: torch.Tensor, lengths: list[int], positions: str) -> torch.Tensor:
    bounds = torch.from_numpy(bounds_of(lengths)).to(DEVICE)
    table, slopes = None, None
    if positions == "rotary":
        table = rotary_table(qkv.shape[3], position_ids(bounds, sum(lengths)))
    else:
        slopes = alibi_slopes(qkv.shape[2]).to(DEVICE)
    return ReferenceAttention(tuple(lengths), table, slopes)(qkv.float())


def check_attention(
    lengths: list[int],
    positions: str,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    backend: AttentionBackend = "triton",
) -> None:
    qkv = random(sum(lengths), 3, 3, head_dim, dtype=dtype)
    actual = attend(qkv, lengths, backend, positions)
    assert actual.dtype == dtype
    assert bool(actual.isfinite().all())
    # Only virnuc's kernels rotate in fp32; others round the rotated queries and keys.
    tolerance = ERROR[dtype] * (1 if backend == "triton" else 2)
    assert relative_error(actual, reference(qkv, lengths, positions)) < tolerance


def check_batch_mates(lengths: list[int], positions: str) -> None:
    """A sequence gets the same bits alone as among others."""
    qkv = random(sum(lengths), 3, 3, 64)
    together = attend(qkv, lengths, "triton", positions).split(lengths)
    for length, own_qkv, expected in zip(lengths, qkv.split(lengths), together, strict=True):
        assert torch.equal(attend(own_qkv.clone(), [length], "triton", positions), expected), length


def check_attention_in_fp8(lengths: list[int], positions: str, dtype: torch.dtype = torch.float16) -> None:
    qkv = random(sum(lengths), 3, 3, 64, dtype=dtype)
    qkv[:, 2] *= 100
    actual = attend(qkv, lengths, "triton", positions, quantize=True)
    assert actual.dtype == torch.float8_e4m3fn
    assert relative_error(actual, reference(qkv, lengths, positions)) < FP8_ERROR


def check_add_norm(
    rows: int, width: int, dtype: torch.dtype = torch.float16, has_branch: bool = True
) -> None:
    residual = random(rows, width, dtype=dtype, seed=1)
    bias, gain, shift = (random(width, dtype=dtype, seed=seed) for seed in (2, 3, 4))
    added = (random(rows, width, dtype=dtype), bias) if has_branch else (None, None)
    total, normed, values, scale = torch.ops.virnuc.add_norm(
        *added, residual, gain, shift, 1e-5, True, True, True
    )
    wanted = residual.double() + (added[0].double() + bias.double() if has_branch else 0.0)
    assert relative_error(total, wanted) < ERROR[dtype]
    wanted = functional.layer_norm(wanted, (width,), gain.double(), shift.double(), 1e-5)
    assert relative_error(normed, wanted) < ERROR[dtype]
    assert relative_error(values.float() * scale, wanted) < FP8_ERROR
    assert bool((values.float().abs().amax(1) == 448).all())
    kept = torch.ops.virnuc.add_norm(*added, residual, gain, shift, 1e-5, False, True, False)
    assert [tensor.numel() for tensor in kept] == [0, rows * width, 0, 0]


def check_fp8_product(gated: bool, num_tokens: int, depth: int, width: int) -> None:
    """The product with activation that is quantized with a scale of its own."""
    x = quantize_rows(random(num_tokens, depth, dtype=torch.float32))
    weight = random(2 * width if gated else width, depth, dtype=torch.float32, seed=1)
    weight = quantize_rows(weight * depth**-0.5)
    bias = None if gated else random(width, dtype=torch.bfloat16, seed=2)
    scale = torch.full((1, 1), 0.03, device=DEVICE)
    actual = torch.ops.virnuc.fp8_linear_gelu(
        *x, weight.values, weight.scale.t().contiguous(), bias, gated, scale
    )
    product = (x.values.double() * x.scale) @ (weight.values.double() * weight.scale).T
    expected = (
        functional.gelu(product[:, 0::2]) * product[:, 1::2]
        if bias is None
        else functional.gelu(product + bias)
    )
    assert (actual.dtype, actual.shape) == (torch.float8_e4m3fn, (num_tokens, width))
    assert relative_error(actual.double() * scale, expected) < FP8_ERROR


def check_product(
    num_tokens: int, depth: int, width: int, *, gated: bool, dtype: torch.dtype = torch.float16
) -> None:
    x, weight = (
        random(num_tokens, depth, dtype=dtype),
        (random((2 if gated else 1) * width, depth, seed=1) * 0.02).to(dtype),
    )
    bias = None if gated else random(width, dtype=dtype, seed=2)
    actual = torch.ops.virnuc.linear_gelu(x, weight, bias, gated)
    product = x.double() @ weight.double().T
    expected = (
        functional.gelu(product[:, 0::2]) * product[:, 1::2] if gated else functional.gelu(product + bias)
    )
    assert actual.shape == (num_tokens, width)
    assert relative_error(actual, expected) < ERROR[dtype]


def check_embedding(lengths: list[int], width: int, mask_token: int = 32) -> None:
    """Some tokens of every sequence but the first are masked."""
    table, share = random(33, width), 0.88
    bounds = torch.from_numpy(bounds_of(lengths)).to(DEVICE)
    numbers = torch.arange(sum(lengths), device=DEVICE)
    input_ids = torch.where((numbers % 3 == 0) & (numbers >= lengths[0]), mask_token, numbers % 31).int()
    embedded = torch.ops.virnuc.embed_tokens(input_ids, bounds, table, mask_token, share)
    is_masked = input_ids == mask_token
    observed = torch.stack([1 - part.double().mean() for part in is_masked.split(lengths)])
    scale = (share / observed).half()[torch.repeat_interleave(torch.tensor(lengths, device=DEVICE))]
    scale[is_masked] = 0
    torch.testing.assert_close(embedded, table[input_ids.long()] * scale[:, None], rtol=2e-3, atol=0)


def check_segment_mean(hidden: torch.Tensor, lengths: list[int], specials: bool) -> torch.Tensor:
    """Returns the means."""
    bounds = torch.from_numpy(bounds_of(lengths))
    with torch.inference_mode():
        means = torch.ops.virnuc.segment_mean(hidden, bounds.to(DEVICE), specials)
    expected = mean_pool(hidden.cpu().float(), bounds, include_special_tokens=specials)
    torch.testing.assert_close(means.cpu(), expected, rtol=1e-5, atol=1e-6)
    return means
