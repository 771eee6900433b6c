"""Attention with torch's own operators: the reference, and scaled_dot_product_attention over rectangles.

Shapes: T tokens, N heads, H head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.columns import concatenated_ranges
from virnuc_core.models.positions import rotate

_MAX_BIAS_ELEMENTS = 2**24  # scores or biases held at once: 64 MB in fp32


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """softmax(q k^T / sqrt(H) + bias) v in fp32, sequence by sequence: the oracle of all others.

    Attributes:
        lengths: tokens of each sequence.
        table: rotary table at the T positions; None with ALiBi.
        slopes: fp32 (N,), ALiBi; None with rotary positions.
    """

    lengths: tuple[int, ...]
    table: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        outputs = []
        for q, k, v in zip(*(x.float().split(self.lengths) for x in turned(qkv, self.table)), strict=True):
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
    """Sequences of similar length that are padded to one (sequences, length) shape.

    Attributes:
        num_sequences: rows.
        length: columns, the longest sequence.
        first_token: where the tokens start, when they lie in the packed buffer as the rectangle has them.
        padded: int64 (num_sequences * length,), token of each slot, a padding slot repeating its
            sequence's first token; None when `first_token` says it all.
        real: int64 (real tokens,), the slots that hold a token; None when all do.
        bias: (num_sequences or 1, N or 1, 1 or length, length), what is added to the scores: ALiBi, and
            -inf on padding; None when nothing is, or when it is made block by block.
    """

    num_sequences: int
    length: int
    first_token: int
    padded: Tensor | None
    real: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class RectangleAttention:
    """torch's scaled_dot_product_attention over rectangles of sequences.

    Attributes:
        rectangles: together covering every token once.
        restore: int64 (T,), place of each packed token in the rectangles' order; None when equal.
        table: rotary table at the T positions; None with ALiBi.
        slopes: fp32 (N,), ALiBi; None with rotary positions.
    """

    rectangles: tuple[Rectangle, ...]
    restore: Tensor | None
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
        """Sorts a batch into rectangles.

        Args:
            cu_seqlens: int32 (B + 1,), starting at 0, on the host.
            table: rotary table at the T positions, or None.
            slopes: ALiBi slopes on the device, or None.
            device: the model's device.
            dtype: the model's dtype, which is that of the biases.
            padded_share: most slots of a rectangle over its real tokens; infinity makes one rectangle.
        """
        starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]
        num_heads = 1 if slopes is None else len(slopes)
        rectangles = tuple(
            _build_rectangle(starts[rows], lengths[rows], slopes, device, dtype)
            for rows in _split_by_length(order, lengths, num_heads, padded_share)
        )
        restore = _restore_index(starts[order], lengths[order], device)
        return cls(rectangles, restore, table, slopes)

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        queries, keys, values = turned(qkv, self.table)
        parts = [_rectangle_attention(queries, keys, values, r, self.slopes) for r in self.rectangles]
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output if self.restore is None else output.index_select(0, self.restore)


def turned(qkv: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (T, 3, N, H), each (T, N, H), turned by the rotary table if there is one."""
    queries_keys, values = qkv[:, :2], qkv[:, 2]
    if table is not None:
        queries_keys = rotate(queries_keys, table)
    queries, keys = queries_keys.unbind(1)
    return queries, keys, values


def _rectangle_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rectangle: Rectangle, slopes: Tensor | None
) -> Tensor:
    """Attention within one rectangle: inputs (T, N, H), result (real tokens of it, N * H)."""
    q, k, v = (_to_rectangle(x, rectangle) for x in (queries, keys, values))
    if slopes is None or rectangle.bias is not None:
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=rectangle.bias)
    else:
        blocks = []
        for begin, end in _query_blocks(rectangle.length, len(slopes)):
            bias = _alibi_bias(slopes, begin, end, rectangle.length).to(q.dtype).unsqueeze(0)
            blocks.append(functional.scaled_dot_product_attention(q[:, :, begin:end], k, v, attn_mask=bias))
        output = torch.cat(blocks, dim=2)
    tokens: Tensor = output.transpose(1, 2).flatten(2).flatten(0, 1)
    return tokens if rectangle.real is None else tokens.index_select(0, rectangle.real)


def _to_rectangle(heads: Tensor, rectangle: Rectangle) -> Tensor:
    """(T, N, H) -> (num_sequences, N, length, H)."""
    if rectangle.padded is None:
        size = rectangle.num_sequences * rectangle.length
        part = heads[rectangle.first_token : rectangle.first_token + size]
    else:
        part = heads.index_select(0, rectangle.padded)
    sequences: Tensor = part.unflatten(0, (rectangle.num_sequences, rectangle.length))
    return sequences.transpose(1, 2)


def _split_by_length(
    order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], num_heads: int, padded_share: float
) -> Iterator[npt.NDArray[np.int64]]:
    """Cuts rows (longest first) into rectangles that waste little and whose bias stays small."""
    begin = 0
    while begin < len(order):
        longest = lengths[order[begin]]
        sizes = lengths[order[begin:]]
        counts = np.arange(1, len(sizes) + 1)
        fits = (longest * counts <= padded_share * np.cumsum(sizes)) & (
            counts * num_heads * longest * longest <= _MAX_BIAS_ELEMENTS
        )
        taken = max(1, len(fits) if fits.all() else int(fits.argmin()))
        yield order[begin : begin + taken]
        begin += taken


def _build_rectangle(
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    slopes: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Rectangle:
    """The rectangle of the sequences at `starts`, longest first."""
    count, length = len(starts), int(lengths[0])
    is_real = np.arange(length) < lengths[:, None]
    all_real = bool(is_real.all())
    in_place = all_real and bool((np.diff(starts) == length).all())
    padded = None
    if not in_place:
        padded = _index((starts[:, None] + np.where(is_real, np.arange(length), 0)).ravel(), device)
    bias = None
    if slopes is not None and len(slopes) * length * length <= _MAX_BIAS_ELEMENTS:
        bias = _alibi_bias(slopes, 0, length, length).unsqueeze(0)
    if not all_real:
        mask = torch.zeros(is_real.shape).masked_fill(torch.from_numpy(~is_real), -torch.inf)
        mask = mask.to(device, non_blocking=True)[:, None, None, :]
        bias = mask if bias is None else bias + mask
    return Rectangle(
        num_sequences=count,
        length=length,
        first_token=int(starts[0]),
        padded=padded,
        real=None if all_real else _index(np.flatnonzero(is_real), device),
        bias=None if bias is None else bias.to(dtype),
    )


def _restore_index(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], device: torch.device
) -> Tensor | None:
    """Where the rectangles' output, sequence after sequence as given, has each packed token."""
    if bool((np.diff(starts) > 0).all()):
        return None
    tokens, _ = concatenated_ranges(starts, lengths)
    restore = np.empty_like(tokens)
    restore[tokens] = np.arange(len(tokens))
    return _index(restore, device)


def _query_blocks(length: int, num_heads: int) -> Iterator[tuple[int, int]]:
    """Ranges of queries whose scores against all `length` keys fit the memory bound."""
    rows = max(1, _MAX_BIAS_ELEMENTS // max(1, num_heads * length))
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


def _index(values: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
