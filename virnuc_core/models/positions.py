"""Positions of packed tokens: rotary angles for ESM-2, ALiBi slopes for DNABERT-S."""

import math

import torch
from torch import Tensor

ROTARY_BASE = 10000.0


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence of each packed token, int64 (T,), 0..B-1; empty sequences are allowed.

    `cu_seqlens` is int32 or int64 (B + 1,), starting at 0; `num_tokens`, its last entry, is passed to avoid
    synchronising.
    """
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def position_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The 0-based position of each packed token in its sequence, int64 (T,); see `sequence_index`."""
    starts = cu_seqlens.long()[sequence_index(cu_seqlens, num_tokens)]
    return torch.arange(num_tokens, device=cu_seqlens.device) - starts


def pair_rows(queries: Tensor, keys: Tensor, values: Tensor, num_heads: int) -> Tensor:
    """Joins the rows of queries, keys and values, each (N * H, ...), to (3 * N * H, ...), with rotary partners side by side.

    Published weights rotate column i of a head with column i + H / 2. Scores do not change when the columns of
    queries and keys are permuted alike, and neighbours can be rotated within a register.
    """
    paired = [part.unflatten(0, (num_heads, 2, -1)).transpose(1, 2) for part in (queries, keys)]
    return torch.cat((*paired, values.unflatten(0, (num_heads, -1, 2)))).flatten(0, 2)


def rotary_table(head_dim: int, positions: Tensor) -> Tensor:
    """Cosine and sine of the rotary angles at `positions` (P,), fp32 (P, H / 2, 2) whatever the model's dtype.

    In half precision the angles would be off by 0.16 rad at position 1022, so they are never cast with the weights.

    Source: fair-esm 2.0.0, esm/rotary_embedding.py.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = torch.outer(positions.float(), 1.0 / ROTARY_BASE**exponents)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(heads: Tensor, table: Tensor) -> Tensor:
    """Rotates the pairs (2i, 2i + 1) of `heads` (T, ..., H) by a `rotary_table` (T, H / 2, 2), in fp32."""
    wide = heads.float()
    per_token = (len(heads), *(1,) * (heads.dim() - 2), -1)
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    if heads.device.type != "cpu":
        rotated = pairs * torch.view_as_complex(table).view(per_token)
        return torch.view_as_real(rotated).flatten(-2).to(heads.dtype)
    # On the CPU, torch rounds complex products differently where the share of a thread begins or ends within a row.
    cosines, sines = (part.repeat_interleave(2, dim=-1).view(per_token) for part in table.unbind(-1))
    turned = torch.view_as_real(pairs * 1j).flatten(-2)  # by 90 degrees, exactly
    return (wide * cosines).add_(turned.mul_(sines)).to(heads.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """The ALiBi slope of each head, fp32 (N,), for any number of heads.

    A power of two n has the slopes 2^(-8/n), 2^(-16/n) .. 2^-8. Any other number takes those of the power of two
    below it, then every other slope of the power of two above it.

    Source: Press et al. 2022 (ALiBi), as used by the DNABERT-S authors' bert_layers.py.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    exponents = [8.0 * (i + 1) / below for i in range(below)]
    exponents += [4.0 * (2 * i + 1) / below for i in range(num_heads - below)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)
