"""Where a token stands in its sequence, and what the two models make of it: rotary angles or ALiBi slopes."""

import math

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


def pair_rows(qkv: Tensor, num_heads: int) -> Tensor:
    """Brings rotary partners together: in every query and key head rows i and i + H / 2 become neighbours.

    Published weights turn column i of a head against column i + H / 2. Scores do not change when the columns
    of queries and keys are reordered alike, and neighbours can be turned without looking elsewhere.

    Args:
        qkv: (3 * N * H, ...), weight or bias with the rows of queries, keys and values one after another.
        num_heads: N.
    """
    queries_keys, values = qkv.tensor_split([2 * len(qkv) // 3])
    paired = queries_keys.unflatten(0, (2 * num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return torch.cat((paired, values))


def rotary_table(head_dim: int, positions: Tensor) -> Tensor:
    """Cosine and sine of the rotary angles, always fp32 whatever the model's dtype.

    A table in half precision would be off by 0.16 rad at position 1022, so the angles come from the
    formula and never from weights that were cast.

    Args:
        head_dim: even width H of a head.
        positions: int64 (P,).

    Returns:
        fp32 (P, H / 2, 2): cosine and sine of each pair's angle.

    Source: fair-esm 2.0.0, esm/rotary_embedding.py.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = torch.outer(positions.float(), 1.0 / ROTARY_BASE**exponents)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(heads: Tensor, table: Tensor) -> Tensor:
    """Rotates each pair of neighbours (2i, 2i + 1) of a head's values by the angle of its position.

    Args:
        heads: (T, ..., H), queries or keys.
        table: fp32 (T, H / 2, 2), from `rotary_table`.

    Returns:
        A tensor of the shape and dtype of `heads`; the arithmetic is fp32.
    """
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    angles = torch.view_as_complex(table)
    rotated = pairs * angles.view(len(heads), *(1,) * (heads.dim() - 2), -1)
    return torch.view_as_real(rotated).flatten(-2).to(heads.dtype)


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
