"""Attention with torch's own operators: the reference, and scaled_dot_product_attention over rectangles.

Shapes: T tokens, N heads, H head dim. `table` is the rotary table at the T positions, None with ALiBi; `slopes` are the
ALiBi slopes, fp32 (N,), None with rotary positions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.models.memory import to_device
from virnuc_core.models.positions import apply_rotary

_MAX_BIAS_ELEMENTS = 2**24  # scores or biases held at once: 64 MB in fp32
_MAX_SCORES = 2**22  # of `_product_attention`: 8 MB in bf16
# In bf16 on the CPU, torch's fused operator in fp32 is up to 2.4 times as fast as `_product_attention` for heads of 16
# and 24, and slower for wider ones.
_MAX_WIDENED_HEAD = 24


def split_qkv(qkv: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Splits (T, 3, N, H) into queries, keys and values (T, N, H); with a table, queries and keys are rotated."""
    queries_keys, values = qkv[:, :2], qkv[:, 2]
    if table is not None:
        queries_keys = apply_rotary(queries_keys, table)
    queries, keys = queries_keys.unbind(1)
    return queries, keys, values


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """softmax(q k^T / sqrt(H) + bias) v in fp32, one sequence at a time: the oracle for the other backends."""

    lengths: tuple[int, ...]
    table: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        outputs = []
        for q, k, v in zip(*(x.float().split(self.lengths) for x in split_qkv(qkv, self.table)), strict=True):
            length, num_heads, head_dim = q.shape
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            for begin, end in _query_blocks(length, num_heads):
                scores = q[:, begin:end] @ k.transpose(1, 2) * head_dim**-0.5
                if self.slopes is not None:
                    scores = scores + _alibi_bias(self.slopes, begin, end, length)
                outputs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(outputs).to(qkv.dtype)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive sequences of similar length, padded to one (num_sequences, length) shape.

    Attributes:
        first_token: offset in the packed buffer.
        gather_idx: int64 (num_sequences * length,), the token of each slot; padding repeats its sequence's first
            token.
        unpad_idx: int64 (real tokens,), the slots that hold tokens; like `gather_idx`, None without padding.
        bias: (num_sequences or 1, N or 1, 1 or length, length), ALiBi plus -inf on padding; None if there is neither,
            or if ALiBi is computed block by block.
    """

    num_sequences: int
    length: int
    first_token: int
    gather_idx: Tensor | None
    unpad_idx: Tensor | None
    bias: Tensor | None

    @classmethod
    def build(
        cls,
        first_token: int,
        lengths: npt.NDArray[np.int64],
        slopes: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Self:
        """Lays out the sequences with these lengths; the biases are in `dtype`."""
        length = int(lengths.max())
        bias = gather_idx = unpad_idx = None
        if slopes is not None and len(slopes) * length * length <= _MAX_BIAS_ELEMENTS:
            bias = _alibi_bias(slopes, 0, length, length).unsqueeze(0)
        if (lengths < length).any():
            is_real = np.arange(length) < lengths[:, None]
            starts = first_token + np.cumsum(lengths) - lengths
            slots = starts[:, None] + np.where(is_real, np.arange(length), 0)
            gather_idx = to_device(slots.ravel(), device)
            unpad_idx = to_device(np.flatnonzero(is_real), device)
            mask = to_device(np.where(is_real, np.float32(0), np.float32(-np.inf)), device)[:, None, None, :]
            bias = mask if bias is None else bias + mask
        bias = None if bias is None else bias.to(dtype)
        return cls(len(lengths), length, first_token, gather_idx, unpad_idx, bias)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> Tensor:
        """Attention within the rectangle: (T, N, H) of the whole batch -> (real tokens of the rectangle, N * H)."""
        q, k, v = (self._pad(x) for x in (queries, keys, values))
        is_bf16_on_cpu = q.device.type == "cpu" and q.dtype == torch.bfloat16
        is_fused = not is_bf16_on_cpu or q.shape[-1] <= _MAX_WIDENED_HEAD
        blocks: Iterable[tuple[int, int]] = [(0, self.length)]
        if not is_fused:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            blocks = _query_blocks(self.length, q.shape[0] * q.shape[1], _MAX_SCORES)
        elif is_bf16_on_cpu:
            q, k, v = q.float(), k.float(), v.float()
        if is_fused and slopes is not None and self.bias is None:
            blocks = _query_blocks(self.length, len(slopes))
        dot_product_attention = functional.scaled_dot_product_attention if is_fused else _product_attention
        parts = [
            dot_product_attention(q[:, :, begin:end], k, v, attn_mask=self._bias(slopes, begin, end, q.dtype))
            for begin, end in blocks
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        tokens: Tensor = output.transpose(1, 2).flatten(2).flatten(0, 1).to(queries.dtype)
        return tokens if self.unpad_idx is None else tokens.index_select(0, self.unpad_idx)

    def _bias(self, slopes: Tensor | None, begin: int, end: int, dtype: torch.dtype) -> Tensor | None:
        """The bias of the queries begin..end-1."""
        if self.bias is not None:
            return (self.bias if self.bias.shape[2] == 1 else self.bias[:, :, begin:end]).to(dtype)
        if slopes is None:
            return None
        return _alibi_bias(slopes, begin, end, self.length).to(dtype).unsqueeze(0)

    def _pad(self, heads: Tensor) -> Tensor:
        """(T, N, H) -> (num_sequences, N, length, H)."""
        if self.gather_idx is None:
            part = heads[self.first_token : self.first_token + self.num_sequences * self.length]
        else:
            part = heads.index_select(0, self.gather_idx)
        sequences: Tensor = part.unflatten(0, (self.num_sequences, self.length))
        return sequences.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class RectangleAttention:
    """scaled_dot_product_attention over rectangles that together cover every token once."""

    rectangles: tuple[Rectangle, ...]
    table: Tensor | None
    slopes: Tensor | None

    @classmethod
    def build(
        cls,
        cu_seqlens: npt.NDArray[np.int32],
        table: Tensor | None,
        slopes: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        padded_share: float,
    ) -> Self:
        """Cuts a batch into rectangles; sequences sorted longest first need the fewest and the least padding.

        `cu_seqlens` is int32 (B + 1,) on the host, starting at 0. `padded_share` is the maximum of slots per real
        token in a rectangle; with infinity, only the memory bound on biases splits a batch.
        """
        lengths = np.diff(cu_seqlens).astype(np.int64)
        lengths = lengths[lengths > 0]
        num_heads = 1 if slopes is None else len(slopes)
        rectangles = []
        begin = first_token = 0
        while begin < len(lengths):
            longest = np.maximum.accumulate(lengths[begin:])
            slots = longest * np.arange(1, len(longest) + 1)
            fits = (slots <= padded_share * np.cumsum(lengths[begin:])) & (
                num_heads * slots * longest <= _MAX_BIAS_ELEMENTS
            )
            end = begin + max(1, len(fits) if fits.all() else int(fits.argmin()))
            rectangles.append(Rectangle.build(first_token, lengths[begin:end], slopes, device, dtype))
            first_token += int(lengths[begin:end].sum())
            begin = end
        return cls(tuple(rectangles), table, slopes)

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        queries, keys, values = split_qkv(qkv, self.table)
        parts = [rectangle.attend(queries, keys, values, self.slopes) for rectangle in self.rectangles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _product_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    """scaled_dot_product_attention by matrix products: (S, N, P, H), twice (S, N, L, H) -> (S, N, P, H).

    In bf16 on the CPU it takes two thirds of the time of torch's fused operator. Scores are rounded to bf16.
    """
    queries, keys, values = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    scale = q.shape[-1] ** -0.5
    scores = torch.baddbmm(q.new_empty(1), queries, keys.transpose(1, 2), beta=0, alpha=scale)
    if attn_mask is not None:
        scores = (scores.unflatten(0, q.shape[:2]) + attn_mask).flatten(0, 1)
    output: Tensor = (scores.softmax(-1) @ values).unflatten(0, q.shape[:2])
    return output


def _query_blocks(
    length: int, num_heads: int, max_elements: int = _MAX_BIAS_ELEMENTS
) -> Iterator[tuple[int, int]]:
    """Ranges of queries whose scores against all `length` keys fit the memory bound."""
    rows = max(1, max_elements // max(1, num_heads * length))
    for begin in range(0, length, rows):
        yield begin, min(begin + rows, length)


def _alibi_bias(slopes: Tensor, begin: int, end: int, length: int) -> Tensor:
    """-slope * |i - j| for queries begin..end-1 and all keys, fp32 (N, end - begin, length).

    Source: the DNABERT-S authors' symmetric ALiBi (bert_layers.py, rebuild_alibi_tensor).
    """
    queries = torch.arange(begin, end, device=slopes.device, dtype=torch.float32)
    keys = torch.arange(length, device=slopes.device, dtype=torch.float32)
    distance = (queries[:, None] - keys[None, :]).abs()
    return -slopes[:, None, None] * distance
