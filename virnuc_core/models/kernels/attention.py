"""Attention over packed tokens that reads the fused QKV buffer, with rotary angles or ALiBi inside.

One program works for one head on one tile. A sequence of up to `RESIDENT_TOKENS` is one tile: its keys and
values are read and turned once and stay in shared memory while its queries pass by. A longer sequence is
cut into tiles of `BLOCK` queries, each of which passes over all keys; these are turned beforehand, once, into
a buffer of their own.

Shapes: T tokens, N heads, H head dim. Rotary positions turn adjacent columns 2i and 2i + 1, so that a pair
lies in one register. In whole sequences queries and keys stay split into their even and odd columns, and
scores are the sum of two products.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 64  # queries and keys of a step
RESIDENT_TOKENS: Final = 3 * BLOCK
_HEADS_TURNED: Final = 5  # by one program, with the angles it has read
_EMPTY: Final = 2  # rows of a list of no tiles
_FEWEST: Final = 3  # rows of any other
_LOG2_E: Final = 1.4426950408889634
_NARROWEST: Final = 32  # two halves of 16 columns, the fewest that tensor cores multiply


def padded_head_dim(head_dim: int) -> int:
    """Columns of a head as the kernels hold it."""
    return max(_NARROWEST, triton.next_power_of_2(head_dim))


def plan_tiles(
    cu_seqlens: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The programs of a batch.

    Args:
        cu_seqlens: int32 (B + 1,), starting at 0.

    Returns:
        For sequences of at most `RESIDENT_TOKENS` and for longer ones: int32 (tiles, 3) of a sequence's
        first token, its length, and the first query of the tile. A list of two rows is an empty one, and
        any other is filled up to three with tiles of length 0: code would be compiled once more for a size
        of 0 or 1.
    """
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    is_long = lengths > RESIDENT_TOKENS
    counts = -(-lengths[is_long] // BLOCK)
    firsts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    short = np.stack((starts[~is_long], lengths[~is_long], np.zeros_like(starts[~is_long])), axis=1)
    long = np.stack(
        (np.repeat(starts[is_long], counts), np.repeat(lengths[is_long], counts), firsts * BLOCK), axis=1
    )
    return _filled_up(short), _filled_up(long)


def _filled_up(tiles: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    missing = max(0, (_FEWEST if len(tiles) else _EMPTY) - len(tiles))
    return np.pad(tiles, ((0, missing), (0, 0))).astype(np.int32)


@triton.jit
def _rows(base, at, length, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """Rows `at` of one head, (rows, PADDED); zeros beyond the sequence and beyond the head."""
    column = tl.arange(0, PADDED)
    real = (at < length)[:, None]
    if HEAD_DIM != PADDED:
        real = real & (column < HEAD_DIM)[None, :]
    return tl.load(base + at[:, None] * STRIDE + column[None, :], mask=real, other=0.0)


@triton.jit
def _turned(rows, at, cos_sin, scale, PADDED: tl.constexpr, ROTARY: tl.constexpr):
    """Even and odd columns of `rows`, each (rows, PADDED / 2), turned by their positions, times `scale`."""
    SHAPE: tl.constexpr = (rows.shape[0], PADDED // 2, 2)
    even, odd = tl.split(tl.reshape(rows.to(tl.float32), SHAPE))
    if ROTARY:
        angles = tl.load(cos_sin + at[:, None] * PADDED + tl.arange(0, PADDED)[None, :])
        cos, sin = tl.split(tl.reshape(angles, SHAPE))
        turned = even * cos - odd * sin
        odd = odd * cos + even * sin
        even = turned
    return (even * scale).to(rows.dtype), (odd * scale).to(rows.dtype)


@triton.jit
def _softmax_step(
    scores, v, rows, keys, length, slope, highest, total, output, ROTARY: tl.constexpr, MASKED: tl.constexpr
):
    """One step of the online softmax, in base 2: from scores against a block of keys to their values."""
    if not ROTARY:
        scores -= slope * tl.abs(rows[:, None] - keys[None, :])
    if MASKED:
        scores = tl.where((keys < length)[None, :], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
    total = total * shrink + tl.sum(weights, 1)
    output = tl.dot(weights.to(v.dtype), v, output * shrink[:, None])
    return higher, total, output


@triton.jit
def _store(
    base, rows, length, output, total, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    column = tl.arange(0, PADDED)
    real = (rows < length)[:, None] & (column < HEAD_DIM)[None, :]
    at = base + rows[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :]
    tl.store(at, (output / total[:, None]).to(base.dtype.element_ty), mask=real)


@triton.jit
def _whole_sequence(
    qkv, out, length, cos_sin, slope, scale, NUM_BLOCKS: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """All queries of a sequence of at most NUM_BLOCKS * ROWS tokens."""
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    next_q = _rows(qkv, tl.arange(0, ROWS), length, STRIDE, HEAD_DIM, PADDED)
    evens = ()
    odds = ()
    values = ()
    for block in tl.static_range(NUM_BLOCKS):
        at = block * ROWS + tl.arange(0, ROWS)
        k = _rows(qkv + WIDTH, at, length, STRIDE, HEAD_DIM, PADDED)
        even, odd = _turned(k, at, cos_sin, 1.0, PADDED, ROTARY)
        evens = evens + (even,)
        odds = odds + (odd,)
        values = values + (_rows(qkv + 2 * WIDTH, at, length, STRIDE, HEAD_DIM, PADDED),)
    for start in range(0, length, ROWS):
        rows = start + tl.arange(0, ROWS)
        q_even, q_odd = _turned(next_q, rows, cos_sin, scale, PADDED, ROTARY)
        next_q = _rows(qkv, rows + ROWS, length, STRIDE, HEAD_DIM, PADDED)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        output = tl.zeros([ROWS, PADDED], tl.float32)
        for block in tl.static_range(NUM_BLOCKS):
            keys = block * ROWS + tl.arange(0, ROWS)
            scores = tl.dot(q_even, tl.trans(evens[block]))
            scores = tl.dot(q_odd, tl.trans(odds[block]), scores)
            highest, total, output = _softmax_step(
                scores, values[block], rows, keys, length, slope, highest, total, output, ROTARY,
                block == NUM_BLOCKS - 1,
            )  # fmt: skip
        _store(out, rows, length, output, total, NUM_HEADS, HEAD_DIM, PADDED)


@triton.jit
def _place(qkv, out, tiles, slopes, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Where this program's sequence and head begin, how long it is, its first query and its ALiBi slope."""
    head = tl.program_id(0)
    tile = tiles + 3 * tl.program_id(1)
    begin = tl.load(tile).to(tl.int64)
    slope = 0.0
    if not ROTARY:
        slope = tl.load(slopes + head) * 1.4426950408889634  # log2(e)
    qkv += (begin * (3 * NUM_HEADS) + head) * HEAD_DIM
    out += (begin * NUM_HEADS + head) * HEAD_DIM
    return qkv, out, tl.load(tile + 1), tl.load(tile + 2), slope


@triton.jit
def _short_kernel(
    qkv, out, tiles, cos_sin, slopes, scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Sequences of at most 3 * ROWS tokens, one a program."""
    qkv, out, length, _, slope = _place(qkv, out, tiles, slopes, NUM_HEADS, HEAD_DIM, ROTARY)
    if length <= ROWS:
        _whole_sequence(qkv, out, length, cos_sin, slope, scale, 1, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY)
    elif length <= 2 * ROWS:
        _whole_sequence(qkv, out, length, cos_sin, slope, scale, 2, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY)
    else:
        _whole_sequence(qkv, out, length, cos_sin, slope, scale, 3, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY)


@triton.jit
def _turn_keys_kernel(
    qkv, turned, tiles, cos_sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The keys of ROWS tokens and TOGETHER heads, turned by their positions."""
    tile = tiles + 3 * tl.program_id(1)
    begin = tl.load(tile).to(tl.int64)
    length = tl.load(tile + 1)
    at = tl.load(tile + 2) + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    real = (at < length)[:, None] & (column < HEAD_DIM)[None, :]
    source = qkv + (3 * begin + 1) * (NUM_HEADS * HEAD_DIM)
    target = turned + begin * (NUM_HEADS * HEAD_DIM) + at[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :]
    first = tl.program_id(0) * TOGETHER
    for head in range(first, min(first + TOGETHER, NUM_HEADS)):
        rows = _rows(source + head * HEAD_DIM, at, length, 3 * NUM_HEADS * HEAD_DIM, HEAD_DIM, PADDED)
        even, odd = _turned(rows, at, cos_sin, 1.0, PADDED, True)
        tl.store(target + head * HEAD_DIM, tl.reshape(tl.join(even, odd), (ROWS, PADDED)), mask=real)


@triton.jit
def _long_kernel(
    qkv, keys, out, tiles, cos_sin, slopes, scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KEY_STRIDE: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a sequence of any length. Only the last block of keys is masked."""
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    begin = tl.load(tiles + 3 * tl.program_id(1)).to(tl.int64)
    keys += begin * KEY_STRIDE + tl.program_id(0) * HEAD_DIM
    qkv, out, length, start, slope = _place(qkv, out, tiles, slopes, NUM_HEADS, HEAD_DIM, ROTARY)
    values = qkv + 2 * WIDTH
    rows = start + tl.arange(0, ROWS)
    q = _rows(qkv, rows, length, STRIDE, HEAD_DIM, PADDED)
    even, odd = _turned(q, rows, cos_sin, scale, PADDED, ROTARY)
    q = tl.reshape(tl.join(even, odd), (ROWS, PADDED))
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED], tl.float32)
    column = tl.arange(0, PADDED)
    last = (length - 1) // ROWS * ROWS
    for first_key in range(0, last, ROWS):
        at = first_key + tl.arange(0, ROWS)
        if HEAD_DIM == PADDED:  # without a mask the copy engine reads ahead
            k = tl.load(keys + at[:, None] * KEY_STRIDE + column[None, :])
            v = tl.load(values + at[:, None] * STRIDE + column[None, :])
        else:
            k = _rows(keys, at, length, KEY_STRIDE, HEAD_DIM, PADDED)
            v = _rows(values, at, length, STRIDE, HEAD_DIM, PADDED)
        scores = tl.dot(q, tl.trans(k))
        highest, total, output = _softmax_step(
            scores, v, rows, at, length, slope, highest, total, output, ROTARY, False
        )
    at = last + tl.arange(0, ROWS)
    scores = tl.dot(q, tl.trans(_rows(keys, at, length, KEY_STRIDE, HEAD_DIM, PADDED)))
    v = _rows(values, at, length, STRIDE, HEAD_DIM, PADDED)
    highest, total, output = _softmax_step(
        scores, v, rows, at, length, slope, highest, total, output, ROTARY, True
    )
    _store(out, rows, length, output, total, NUM_HEADS, HEAD_DIM, PADDED)


@torch.library.custom_op("virnuc::packed_attention", mutates_args=())
def packed_attention(
    qkv: Tensor, short_tiles: Tensor, long_tiles: Tensor, cos_sin: Tensor | None, slopes: Tensor | None
) -> Tensor:
    """Attention of every token to all tokens of its own sequence.

    Args:
        qkv: fp16 or bf16 (T, 3, N, H), contiguous; H even, at most 128.
        short_tiles: int32 (tiles, 3), from `plan_tiles`.
        long_tiles: the same of the longer sequences.
        cos_sin: fp32 (P, padded H / 2, 2), P a multiple of `BLOCK` that no sequence exceeds; None
            with ALiBi.
        slopes: fp32 (N,), ALiBi; None with rotary positions.

    Returns:
        (T, N * H).
    """
    num_tokens, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty(num_tokens, num_heads * head_dim)
    padded = padded_head_dim(head_dim)
    rotary = cos_sin is not None
    # With at most 128 registers a thread, four programs share a multiprocessor. Wider heads need more.
    limit = {"maxnreg": 128} if padded <= 64 else {}
    shared = (cos_sin, slopes, head_dim**-0.5 * _LOG2_E, num_heads, head_dim, padded, BLOCK)
    if len(short_tiles) > _EMPTY:
        _short_kernel[(num_heads, len(short_tiles))](
            qkv, out, short_tiles, *shared, rotary, num_warps=4, num_stages=1, **limit
        )
    if len(long_tiles) > _EMPTY:
        keys, key_stride = _long_keys(qkv, long_tiles, cos_sin)
        _long_kernel[(num_heads, len(long_tiles))](
            qkv, keys, out, long_tiles, *shared, key_stride, rotary, num_warps=4, num_stages=3, **limit
        )
    return out


def _long_keys(qkv: Tensor, tiles: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, int]:
    """The keys of the long sequences, turned where positions are rotary, and elements from row to row."""
    num_tokens, _, num_heads, head_dim = qkv.shape
    if cos_sin is None:
        return qkv[:, 1], 3 * num_heads * head_dim
    turned = qkv.new_empty(num_tokens, num_heads, head_dim)
    _turn_keys_kernel[(triton.cdiv(num_heads, _HEADS_TURNED), len(tiles))](
        qkv, turned, tiles, cos_sin, num_heads, head_dim, padded_head_dim(head_dim), BLOCK, _HEADS_TURNED,
        num_warps=4,
    )  # fmt: skip
    return turned, num_heads * head_dim


@packed_attention.register_fake
def _(
    qkv: Tensor, short_tiles: Tensor, long_tiles: Tensor, cos_sin: Tensor | None, slopes: Tensor | None
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[2] * qkv.shape[3])
