"""Where a token stands in its sequence, and what the two models make of it: rotary angles or ALiBi slopes."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

ROTARY_BASE = 10000.0


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence that each packed token belongs to.

    Args:
        cu_seqlens: int32 or int64 (B + 1,), starting at 0; empty sequences are allowed.
        num_tokens: T, the last entry of `cu_seqlens`, given so that no device is waited for.

    Returns:
        int64 (T,), 0..B-1.
    """
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def position_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The 0-based position of each packed token in its own sequence.

    Args:
        cu_seqlens: int32 or int64 (B + 1,), starting at 0; empty sequences are allowed.
        num_tokens: T, the last entry of `cu_seqlens`.

    Returns:
        int64 (T,); for cu_seqlens [0, 3, 7, 10]: 0, 1, 2, 0, 1, 2, 3, 0, 1, 2.
    """
    starts = cu_seqlens.long()[sequence_index(cu_seqlens, num_tokens)]
    return torch.arange(num_tokens, device=cu_seqlens.device) - starts


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosine and sine of the rotary angles at given positions, always fp32 whatever the model's dtype.

    A table in half precision would be off by 0.16 rad at position 1022, so the angles come from the
    formula and never from weights that were cast. Both halves of a head are stored, with the sign that
    each half takes, so that `rotate` is one product and one fused multiply-add.

    Attributes:
        cos: fp32 (positions, H), columns i and i + H / 2 alike.
        sin: fp32 (positions, H), negative in the first half.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, head_dim: int, positions: Tensor) -> Self:
        """The table for heads of even width H.

        Args:
            head_dim: H.
            positions: int64 (positions,), for instance the position of every packed token.

        Source: fair-esm 2.0.0, esm/rotary_embedding.py.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
        angles = torch.outer(positions.float(), 1.0 / ROTARY_BASE**exponents)
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1))


def rotate(heads: Tensor, rotary: RotaryTable) -> Tensor:
    """Turns each pair (i, i + H / 2) of a head's values by the angle of its position.

    Args:
        heads: (T, ..., H), queries or keys.
        rotary: the table at the T positions.

    Returns:
        A tensor of the shape and dtype of `heads`; the arithmetic is fp32.
    """
    shape = (len(heads),) + (1,) * (heads.dim() - 2) + (-1,)
    values = heads.float()
    partners = values.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(values * rotary.cos.view(shape), partners, rotary.sin.view(shape)).to(heads.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """The ALiBi slope of each head, fp32 (N,), for any number of heads.

    A power of two n has the slopes 2^(-8/n), 2^(-16/n) .. 2^-8. Any other number takes those of the power
    of two below it and then every other slope of the power of two above it.

    Source: Press et al. 2022 (ALiBi), as used by the DNABERT-S authors' bert_layers.py.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    exponents = [8.0 * (i + 1) / below for i in range(below)]
    exponents += [4.0 * (2 * i + 1) / below for i in range(num_heads - below)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)
