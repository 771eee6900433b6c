"""Attention over packed tokens that reads the fused QKV buffer, with rotary angles or ALiBi inside.

One program works for one head on one tile. A sequence of up to `attention_tiles.RESIDENT_TOKENS` is one tile: its keys and
values are read and turned once and stay in shared memory while its queries pass by. A longer sequence is
cut into tiles of `BLOCK` queries, each of which passes over all keys; these are turned beforehand, once, into
a buffer of their own.

Shapes: T tokens, N heads, H head dim. Rotary positions turn adjacent columns 2i and 2i + 1, so that a pair
lies in one register. In whole sequences queries and keys stay split into their even and odd columns, and
scores are the sum of two products.

Offsets within a whole sequence fit int32. Those within a longer one do not (12 heads of 64 reach 2^31 elements
at 932,068 tokens), so a block's first row is added to the base pointer in int64.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.models.kernels.attention_tiles import BLOCK, EMPTY, fits_resident, padded_head_dim
from virnuc_core.models.kernels.launch import launch, shared_memory

_HEADS_TURNED: Final = 5  # by one program, with the angles it has read
_LOG2_E: Final = 1.4426950408889634


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
def _keys_and_values(
    qkv, block, length, cos_sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Even and odd columns of a block's keys, turned, and its values."""
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    at = block * ROWS + tl.arange(0, ROWS)
    k = _rows(qkv + WIDTH, at, length, STRIDE, HEAD_DIM, PADDED)
    even, odd = _turned(k, at, cos_sin, 1.0, PADDED, ROTARY)
    return even, odd, _rows(qkv + 2 * WIDTH, at, length, STRIDE, HEAD_DIM, PADDED)


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
    RESIDENT: tl.constexpr,
):  # fmt: skip
    """All queries of a sequence of at most NUM_BLOCKS * ROWS tokens.

    Its keys and values are read once if RESIDENT, and else once for each block of queries.
    """
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    next_q = _rows(qkv, tl.arange(0, ROWS), length, STRIDE, HEAD_DIM, PADDED)
    evens = ()
    odds = ()
    values = ()
    if RESIDENT:
        for block in tl.static_range(NUM_BLOCKS):
            even, odd, v = _keys_and_values(
                qkv, block, length, cos_sin, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY
            )
            evens = evens + (even,)
            odds = odds + (odd,)
            values = values + (v,)
    for start in range(0, length, ROWS):
        rows = start + tl.arange(0, ROWS)
        q_even, q_odd = _turned(next_q, rows, cos_sin, scale, PADDED, ROTARY)
        next_q = _rows(qkv, rows + ROWS, length, STRIDE, HEAD_DIM, PADDED)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        output = tl.zeros([ROWS, PADDED], tl.float32)
        for block in tl.static_range(NUM_BLOCKS):
            keys = block * ROWS + tl.arange(0, ROWS)
            if RESIDENT:
                even, odd, v = evens[block], odds[block], values[block]
            else:
                even, odd, v = _keys_and_values(
                    qkv, block, length, cos_sin, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY
                )
            scores = tl.dot(q_even, tl.trans(even))
            scores = tl.dot(q_odd, tl.trans(odd), scores)
            highest, total, output = _softmax_step(
                scores, v, rows, keys, length, slope, highest, total, output, ROTARY,
                block == NUM_BLOCKS - 1,
            )  # fmt: skip
        _store(out, rows, length, output, total, NUM_HEADS, HEAD_DIM, PADDED)


@triton.jit
def _place(tiles, slopes, NUM_HEADS: tl.constexpr, ROTARY: tl.constexpr):
    """This program's head and its ALiBi slope, its sequence's first token and length, and its first query.

    The grid has one dimension, since the others end at 65,535, and heads vary fastest.
    """
    head = tl.program_id(0) % NUM_HEADS
    tile = tiles + 3 * (tl.program_id(0) // NUM_HEADS)
    slope = 0.0
    if not ROTARY:
        slope = tl.load(slopes + head) * 1.4426950408889634  # log2(e)
    return head, slope, tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def _short_kernel(
    qkv, out, tiles, cos_sin, slopes, scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """Sequences of at most 3 * ROWS tokens, one a program."""
    head, slope, begin, length, _ = _place(tiles, slopes, NUM_HEADS, ROTARY)
    qkv += (begin * (3 * NUM_HEADS) + head) * HEAD_DIM
    out += (begin * NUM_HEADS + head) * HEAD_DIM
    if length <= ROWS:
        _whole_sequence(
            qkv, out, length, cos_sin, slope, scale, 1, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY, RESIDENT
        )
    elif length <= 2 * ROWS:
        _whole_sequence(
            qkv, out, length, cos_sin, slope, scale, 2, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY, RESIDENT
        )
    else:
        _whole_sequence(
            qkv, out, length, cos_sin, slope, scale, 3, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY, RESIDENT
        )


@triton.jit
def _turn_keys_kernel(
    qkv, turned, tiles, cos_sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The keys of ROWS tokens and TOGETHER heads, turned by their positions."""
    GROUPS: tl.constexpr = (NUM_HEADS + TOGETHER - 1) // TOGETHER
    tile = tiles + 3 * (tl.program_id(0) // GROUPS)
    start = tl.load(tile + 2)
    left = tl.load(tile + 1) - start
    first_row = tl.load(tile).to(tl.int64) + start
    at = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    real = (at < left)[:, None] & (column < HEAD_DIM)[None, :]
    source = qkv + (3 * first_row + 1) * (NUM_HEADS * HEAD_DIM)
    target = (
        turned + first_row * (NUM_HEADS * HEAD_DIM) + at[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :]
    )
    cos_sin += start.to(tl.int64) * PADDED
    first = tl.program_id(0) % GROUPS * TOGETHER
    for head in range(first, min(first + TOGETHER, NUM_HEADS)):
        rows = _rows(source + head * HEAD_DIM, at, left, 3 * NUM_HEADS * HEAD_DIM, HEAD_DIM, PADDED)
        even, odd = _turned(rows, at, cos_sin, 1.0, PADDED, True)
        tl.store(target + head * HEAD_DIM, tl.reshape(tl.join(even, odd), (ROWS, PADDED)), mask=real)


@triton.jit
def _long_kernel(
    qkv, keys, out, tiles, cos_sin, slopes, scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KEY_STRIDE: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a sequence of any length. Only the last block of keys is masked."""
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    head, slope, begin, length, start = _place(tiles, slopes, NUM_HEADS, ROTARY)
    first_row = begin + start
    keys += begin * KEY_STRIDE + head * HEAD_DIM
    values = qkv + (begin * (3 * NUM_HEADS) + 2 * NUM_HEADS + head) * HEAD_DIM
    qkv += (first_row * (3 * NUM_HEADS) + head) * HEAD_DIM
    out += (first_row * NUM_HEADS + head) * HEAD_DIM
    if ROTARY:
        cos_sin += start.to(tl.int64) * PADDED
    at = tl.arange(0, ROWS)
    rows = start + at
    q = _rows(qkv, at, length - start, STRIDE, HEAD_DIM, PADDED)
    even, odd = _turned(q, at, cos_sin, scale, PADDED, ROTARY)
    q = tl.reshape(tl.join(even, odd), (ROWS, PADDED))
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED], tl.float32)
    column = tl.arange(0, PADDED)
    last = (length - 1) // ROWS * ROWS
    for first_key in range(0, last, ROWS):
        block_keys = keys + tl.cast(first_key, tl.int64) * KEY_STRIDE
        block_values = values + tl.cast(first_key, tl.int64) * STRIDE
        if HEAD_DIM == PADDED:  # without a mask the copy engine reads ahead
            k = tl.load(block_keys + at[:, None] * KEY_STRIDE + column[None, :])
            v = tl.load(block_values + at[:, None] * STRIDE + column[None, :])
        else:
            k = _rows(block_keys, at, ROWS, KEY_STRIDE, HEAD_DIM, PADDED)
            v = _rows(block_values, at, ROWS, STRIDE, HEAD_DIM, PADDED)
        scores = tl.dot(q, tl.trans(k))
        highest, total, output = _softmax_step(
            scores, v, rows, first_key + at, length, slope, highest, total, output, ROTARY, False
        )
    keys += last.to(tl.int64) * KEY_STRIDE
    values += last.to(tl.int64) * STRIDE
    scores = tl.dot(q, tl.trans(_rows(keys, at, length - last, KEY_STRIDE, HEAD_DIM, PADDED)))
    v = _rows(values, at, length - last, STRIDE, HEAD_DIM, PADDED)
    highest, total, output = _softmax_step(
        scores, v, rows, last + at, length, slope, highest, total, output, ROTARY, True
    )
    _store(out, at, length - start, output, total, NUM_HEADS, HEAD_DIM, PADDED)


@torch.library.custom_op("virnuc::packed_attention", mutates_args=())
def packed_attention(
    qkv: Tensor, short_tiles: Tensor, long_tiles: Tensor, cos_sin: Tensor | None, slopes: Tensor | None
) -> Tensor:
    """Attention of every token to all tokens of its own sequence.

    Args:
        qkv: fp16 or bf16 (T, 3, N, H), contiguous; H even, at most 128.
        short_tiles: int32 (tiles, 3), from `attention_tiles.plan_tiles`.
        long_tiles: the same of the longer sequences.
        cos_sin: fp32 (P, padded H / 2, 2), P a multiple of `BLOCK` that no sequence exceeds; None
            with ALiBi.
        slopes: fp32 (N,), ALiBi; None with rotary positions.

    Returns:
        (T, N * H).

    Raises:
        DeviceError: the device has too little of what a kernel needs.
    """
    num_tokens, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty(num_tokens, num_heads * head_dim)
    padded = padded_head_dim(head_dim)
    rotary = cos_sin is not None
    # With at most 128 registers a thread, four programs share a multiprocessor. Wider heads need more.
    limit = {"maxnreg": 128} if padded <= 64 else {}
    shared = (cos_sin, slopes, head_dim**-0.5 * _LOG2_E, num_heads, head_dim, padded, BLOCK)
    if len(short_tiles) > EMPTY:
        resident = fits_resident(head_dim, shared_memory(qkv.device))
        launch(
            _short_kernel, len(short_tiles) * num_heads, qkv, out, short_tiles, *shared, rotary, resident,
            num_warps=4, num_stages=1, **limit,
        )  # fmt: skip
    if len(long_tiles) > EMPTY:
        keys, key_stride = _long_keys(qkv, long_tiles, cos_sin)
        launch(
            _long_kernel, len(long_tiles) * num_heads, qkv, keys, out, long_tiles, *shared, key_stride, rotary,
            num_warps=4, num_stages=3, **limit,
        )  # fmt: skip
    return out


def _long_keys(qkv: Tensor, tiles: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, int]:
    """The keys of the long sequences, turned where positions are rotary, and elements from row to row."""
    num_tokens, _, num_heads, head_dim = qkv.shape
    if cos_sin is None:
        return qkv[:, 1], 3 * num_heads * head_dim
    turned = qkv.new_empty(num_tokens, num_heads, head_dim)
    launch(
        _turn_keys_kernel, len(tiles) * triton.cdiv(num_heads, _HEADS_TURNED), qkv, turned, tiles, cos_sin,
        num_heads, head_dim, padded_head_dim(head_dim), BLOCK, _HEADS_TURNED, num_warps=4,
    )  # fmt: skip
    return turned, num_heads * head_dim


@packed_attention.register_fake
def _(
    qkv: Tensor, short_tiles: Tensor, long_tiles: Tensor, cos_sin: Tensor | None, slopes: Tensor | None
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[2] * qkv.shape[3])
