"""The mean hidden state of each sequence of a packed batch, summed in fp32."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.models.kernels.launch import launch

_TOKENS: Final = 32
_COLUMNS: Final = 64


@triton.jit
def _mean_kernel(
    hidden, cu_seqlens, out, D: tl.constexpr, SKIPPED: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the mean of one sequence; SKIPPED tokens are left out at either end."""
    BLOCKS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    sequence = tl.program_id(0) // BLOCKS
    begin = tl.load(cu_seqlens + sequence).to(tl.int64) + SKIPPED
    count = tl.load(cu_seqlens + sequence + 1) - SKIPPED - begin
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    base = hidden + begin * D + column[None, :]
    sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)
        real = (token < count)[:, None] & (column < D)[None, :]
        sums += tl.load(base + token[:, None] * D, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / tl.maximum(count, 1)
    tl.store(out + sequence.to(tl.int64) * D + column, mean, mask=column < D)


@torch.library.custom_op("virnuc::segment_mean", mutates_args=())
def segment_mean(hidden_states: Tensor, cu_seqlens: Tensor, specials: bool) -> Tensor:
    """See `virnuc_core.models.pooling.mean_pool`; the order of summation depends on a sequence's length only.

    Args:
        hidden_states: (T, D), contiguous.
        cu_seqlens: int32 (B + 1,).
        specials: whether the first and last token count.

    Returns:
        fp32 (B, D).
    """
    width, num_sequences = hidden_states.shape[1], len(cu_seqlens) - 1
    out = hidden_states.new_empty((num_sequences, width), dtype=torch.float32)
    launch(
        _mean_kernel, num_sequences * triton.cdiv(width, _COLUMNS), hidden_states, cu_seqlens, out, width,
        0 if specials else 1, _TOKENS, _COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
