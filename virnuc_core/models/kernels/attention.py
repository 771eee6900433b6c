"""Attention over packed tokens that reads the fused QKV buffer, with rotary angles or ALiBi inside.

One program computes one head of one tile. A sequence of up to `RESIDENT_TOKENS` is one tile: its keys and values are
loaded and rotated once and stay in shared memory for all of its queries. With rotary positions and heads of up to 64
columns, so do its queries on data centre GPUs since Hopper, whose tensor cores read them there, and all scores of a
query are there before its softmax. A longer sequence is cut into tiles of `BLOCK` queries, each of which iterates over
all keys, rotated once beforehand into a buffer of their own.

Shapes: B sequences, T tokens, N heads, H head dim. Rotary positions rotate adjacent columns 2i and 2i + 1, so that a
pair lies in one register.

Offsets within a sequence of one tile fit int32. Those within a longer one do not (12 heads of 64 reach 2^31 elements
at 932,068 tokens), so a block's first row is added to the base pointer in int64.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from virnuc_core.models.kernels.launch import DATACENTER_SHARED_MEMORY, launch, shared_memory
from virnuc_core.models.kernels.rowwise import FP8

BLOCK: Final = 64  # queries and keys of a step
RESIDENT_TOKENS: Final = 3 * BLOCK


def padded_head_dim(head_dim: int) -> int:
    """Columns of a head in the kernels: a power of two, in two halves of at least 16, the fewest that tensor cores multiply."""
    return max(32, triton.next_power_of_2(head_dim))


def programs_that_fit(head_dim: int, shared_memory: int) -> int:
    """Programs whose keys and values of `RESIDENT_TOKENS` and block of queries fit into `shared_memory` bytes."""
    columns = (2 * RESIDENT_TOKENS + BLOCK) * padded_head_dim(head_dim)
    return shared_memory // (columns * torch.float16.itemsize)


def register_limit(programs: int) -> dict[str, int]:
    """The option of a launch by which that many programs, four at most, share the registers of a multiprocessor."""
    threads = 128 * min(programs, 4)
    return {"maxnreg": 65_536 // threads // 8 * 8} if programs > 2 else {}  # a thread has 255 at most


def plan_tiles(
    cu_seqlens: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The tiles of the sequences of at most `RESIDENT_TOKENS`, and of the longer ones, from `cu_seqlens` (B + 1,).

    Returns:
        Two int32 (tiles, 3): first token and length of a sequence, first query of the tile.
    """
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    is_long = lengths > RESIDENT_TOKENS
    is_short = (lengths > 0) & ~is_long
    counts = -(-lengths[is_long] // BLOCK)
    firsts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    short = np.stack((starts[is_short], lengths[is_short], np.zeros_like(starts[is_short])), axis=1)
    long = np.stack(
        (np.repeat(starts[is_long], counts), np.repeat(lengths[is_long], counts), firsts * BLOCK), axis=1
    )
    return short, long.astype(np.int32)


@triton.jit
def _rows(
    base, at, length, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    FULL: tl.constexpr = False,
):  # fmt: skip
    """Rows `at` of one head, (rows, PADDED); zeros beyond the head and, unless FULL, beyond the sequence."""
    column = tl.arange(0, PADDED)
    rows = base + at[:, None] * STRIDE + column[None, :]
    if FULL and HEAD_DIM == PADDED:  # without a mask it becomes cp.async
        loaded = tl.load(rows)
    else:
        loaded = tl.load(rows, mask=(at < length)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    return loaded


@triton.jit
def _angles(cos_sin, at, PADDED: tl.constexpr):
    """Cosines and sines at positions `at`, each (rows, PADDED / 2)."""
    table = tl.load(cos_sin + at[:, None] * PADDED + tl.arange(0, PADDED)[None, :])
    return tl.split(tl.reshape(table, (at.shape[0], PADDED // 2, 2)))


@triton.jit
def _rotate(rows, cos, sin, PADDED: tl.constexpr):
    """`rows` (rows, PADDED), each pair of columns rotated."""
    even, odd = tl.split(tl.reshape(rows.to(tl.float32), (rows.shape[0], PADDED // 2, 2)))
    rotated = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(rotated, (rows.shape[0], PADDED)).to(rows.dtype)


@triton.jit
def _apply_rotary(rows, at, cos_sin, scale, PADDED: tl.constexpr, ROTARY: tl.constexpr):
    """Even and odd columns of `rows`, each (rows, PADDED / 2), rotated by their positions, times `scale`."""
    even, odd = tl.split(tl.reshape(rows.to(tl.float32), (rows.shape[0], PADDED // 2, 2)))
    if ROTARY:
        cos, sin = _angles(cos_sin, at, PADDED)
        rotated = even * cos - odd * sin
        odd = odd * cos + even * sin
        even = rotated
    return (even * scale).to(rows.dtype), (odd * scale).to(rows.dtype)


@triton.jit
def _keys_and_values(
    qkv, block, length, cos_sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Even and odd columns of a block's keys, rotated, and its values."""
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    at = block * ROWS + tl.arange(0, ROWS)
    k = _rows(qkv + WIDTH, at, length, STRIDE, HEAD_DIM, PADDED)
    even, odd = _apply_rotary(k, at, cos_sin, 1.0, PADDED, ROTARY)
    return even, odd, _rows(qkv + 2 * WIDTH, at, length, STRIDE, HEAD_DIM, PADDED)


@triton.jit
def _halves_step(
    q_even, q_odd, even, odd, v, rows, keys, length, slope, m_i, l_i, acc, ROTARY: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, in base 2, over a block of keys; columns of queries and keys are split."""
    scores = tl.dot(q_even, tl.trans(even))
    scores = tl.dot(q_odd, tl.trans(odd), scores)
    if not ROTARY:
        scores -= slope * tl.abs(rows[:, None] - keys[None, :])
    if MASKED:
        scores = tl.where((keys < length)[None, :], scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    weights = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
    return m_new, l_i, acc


@triton.jit
def _long_step(scores, v, m_i, l_i, acc):
    """One step of the online softmax, in base 2, from scores against a block of keys, for products in a loop."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    weights = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(weights, 1)
    # The product does not accumulate into acc: the assembler would serialise all products around the scaling of acc.
    acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), tl.dot(weights.to(v.dtype), v))
    return m_new, l_i, acc


@triton.jit
def _alibi(scores, rows, keys, slope):
    """`scores` less the ALiBi penalty of each query's distance to each key."""
    return scores - slope * tl.abs(rows.to(tl.float32)[:, None] - keys.to(tl.float32)[None, :])


@triton.jit
def _store(
    base, rows, length, acc, l_i, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    column = tl.arange(0, PADDED)
    real = (rows < length)[:, None] & (column < HEAD_DIM)[None, :]
    at = base + rows[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :]
    tl.store(at, (acc * (1.0 / l_i)[:, None]).to(base.dtype.element_ty), mask=real)


@triton.jit
def _attend(q, ks, vs, length, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Weighted sums of the values and sums of the weights of ROWS queries, over all blocks of keys."""
    scores = ()
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for block in tl.static_range(NUM_BLOCKS):
        keys = block * ROWS + tl.arange(0, ROWS)
        block_scores = tl.dot(q, tl.trans(ks[block]))
        if block == NUM_BLOCKS - 1:
            block_scores = tl.where((keys < length)[None, :], block_scores, float("-inf"))
        m = tl.maximum(m, tl.max(block_scores, 1))
        scores = scores + (block_scores,)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for block in tl.static_range(NUM_BLOCKS):
        weights = tl.exp2(scores[block] - m[:, None])
        l_i += tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), vs[block], acc)
    return acc, l_i


@triton.jit
def _at_once(
    qkv, out, length, cos_sin, scale, NUM_BLOCKS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A sequence of at most NUM_BLOCKS * ROWS tokens with rotary positions, its queries in shared memory too.

    The angles of a block are those of the block before, turned by the angles of position ROWS.
    """
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    qs = ()
    ks = ()
    vs = ()
    cos, sin = _angles(cos_sin, tl.arange(0, ROWS), PADDED)
    for block in tl.static_range(NUM_BLOCKS):
        at = block * ROWS + tl.arange(0, ROWS)
        k = _rows(qkv + WIDTH, at, length, STRIDE, HEAD_DIM, PADDED, block < NUM_BLOCKS - 1)
        q = _rows(qkv, at, length, STRIDE, HEAD_DIM, PADDED, block < NUM_BLOCKS - 1)
        v = _rows(qkv + 2 * WIDTH, at, length, STRIDE, HEAD_DIM, PADDED, block < NUM_BLOCKS - 1)
        if block > 0:
            turn_cos, turn_sin = _angles(cos_sin, ROWS + tl.arange(0, 1), PADDED)
            cos, sin = cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin
        qs = qs + (_rotate(q, cos * scale, sin * scale, PADDED),)
        ks = ks + (_rotate(k, cos, sin, PADDED),)
        vs = vs + (v,)
    for block in tl.static_range(NUM_BLOCKS):
        rows = block * ROWS + tl.arange(0, ROWS)
        acc, l_i = _attend(qs[block], ks, vs, length, NUM_BLOCKS, PADDED, ROWS)
        _store(out, rows, length, acc, l_i, NUM_HEADS, HEAD_DIM, PADDED)


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
        q_even, q_odd = _apply_rotary(next_q, rows, cos_sin, scale, PADDED, ROTARY)
        next_q = _rows(qkv, rows + ROWS, length, STRIDE, HEAD_DIM, PADDED)
        m_i = tl.full([ROWS], float("-inf"), tl.float32)
        l_i = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        if RESIDENT:
            for block in tl.static_range(NUM_BLOCKS):
                keys = block * ROWS + tl.arange(0, ROWS)
                m_i, l_i, acc = _halves_step(
                    q_even, q_odd, evens[block], odds[block], values[block], rows, keys, length, slope,
                    m_i, l_i, acc, ROTARY, block == NUM_BLOCKS - 1,
                )  # fmt: skip
        else:
            for block in range(NUM_BLOCKS):  # unrolled, it would need more registers than there are
                keys = block * ROWS + tl.arange(0, ROWS)
                even, odd, v = _keys_and_values(
                    qkv, block, length, cos_sin, NUM_HEADS, HEAD_DIM, PADDED, ROWS, ROTARY
                )
                m_i, l_i, acc = _halves_step(
                    q_even, q_odd, even, odd, v, rows, keys, length, slope, m_i, l_i, acc, ROTARY, True
                )
        _store(out, rows, length, acc, l_i, NUM_HEADS, HEAD_DIM, PADDED)


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
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sequences of at most 3 * ROWS tokens, one a program."""
    head, slope, begin, length, _ = _place(tiles, slopes, NUM_HEADS, ROTARY)
    qkv += (begin * (3 * NUM_HEADS) + head) * HEAD_DIM
    out += (begin * NUM_HEADS + head) * HEAD_DIM
    if AT_ONCE:
        if length <= ROWS:
            _at_once(qkv, out, length, cos_sin, scale, 1, NUM_HEADS, HEAD_DIM, PADDED, ROWS)
        elif length <= 2 * ROWS:
            _at_once(qkv, out, length, cos_sin, scale, 2, NUM_HEADS, HEAD_DIM, PADDED, ROWS)
        else:
            _at_once(qkv, out, length, cos_sin, scale, 3, NUM_HEADS, HEAD_DIM, PADDED, ROWS)
    elif length <= ROWS:
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
def _rotate_keys_kernel(
    qkv, rotated, tiles, cos_sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The keys of ROWS tokens and TOGETHER heads, rotated by their positions."""
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
        rotated + first_row * (NUM_HEADS * HEAD_DIM) + at[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :]
    )
    cos_sin += start.to(tl.int64) * PADDED
    cos, sin = _angles(cos_sin, at, PADDED)
    first = tl.program_id(0) % GROUPS * TOGETHER
    for head in range(first, min(first + TOGETHER, NUM_HEADS)):
        rows = _rows(source + head * HEAD_DIM, at, left, 3 * NUM_HEADS * HEAD_DIM, HEAD_DIM, PADDED)
        tl.store(target + head * HEAD_DIM, _rotate(rows, cos, sin, PADDED), mask=real)


@triton.jit
def _long_kernel(
    qkv, keys, out, tiles, cos_sin, slopes, scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KEY_STRIDE: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a sequence of any length. Its last block of keys, the only one that is masked, comes first."""
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    head, slope, begin, length, start = _place(tiles, slopes, NUM_HEADS, ROTARY)
    first_row = begin + start
    keys += begin * KEY_STRIDE + head * HEAD_DIM
    values = qkv + (begin * (3 * NUM_HEADS) + 2 * NUM_HEADS + head) * HEAD_DIM
    qkv += (first_row * (3 * NUM_HEADS) + head) * HEAD_DIM
    out += (first_row * NUM_HEADS + head) * HEAD_DIM
    at = tl.arange(0, ROWS)
    rows = start + at
    q = _rows(qkv, at, length - start, STRIDE, HEAD_DIM, PADDED)
    if ROTARY:
        cos, sin = _angles(cos_sin + start.to(tl.int64) * PADDED, at, PADDED)
        q = _rotate(q, cos * scale, sin * scale, PADDED)
    else:
        q = (q.to(tl.float32) * scale).to(q.dtype)
    last = (length - 1) // ROWS * ROWS
    last_keys = keys + last.to(tl.int64) * KEY_STRIDE
    last_values = values + last.to(tl.int64) * STRIDE
    k = _rows(last_keys, at, length - last, KEY_STRIDE, HEAD_DIM, PADDED)
    v = _rows(last_values, at, length - last, STRIDE, HEAD_DIM, PADDED)
    scores = tl.dot(q, tl.trans(k))
    if not ROTARY:
        scores = _alibi(scores, rows, last + at, slope)
    scores = tl.where((last + at < length)[None, :], scores, float("-inf"))
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    m_i, l_i, acc = _long_step(scores, v, m_i, l_i, acc)
    for first_key in range(0, last, ROWS):
        block_keys = keys + tl.cast(first_key, tl.int64) * KEY_STRIDE
        block_values = values + tl.cast(first_key, tl.int64) * STRIDE
        k = _rows(block_keys, at, ROWS, KEY_STRIDE, HEAD_DIM, PADDED, True)
        v = _rows(block_values, at, ROWS, STRIDE, HEAD_DIM, PADDED, True)
        scores = tl.dot(q, tl.trans(k))
        if not ROTARY:
            scores = _alibi(scores, rows, first_key + at, slope)
        m_i, l_i, acc = _long_step(scores, v, m_i, l_i, acc)
    _store(out, at, length - start, acc, l_i, NUM_HEADS, HEAD_DIM, PADDED)


def packed_attention(
    qkv: Tensor,
    short_tiles: Tensor,
    long_tiles: Tensor,
    cos_sin: Tensor | None,
    slopes: Tensor | None,
    quantize: bool = False,
) -> Tensor:
    """Attention of every token to all tokens of its own sequence: (T, 3, N, H) -> (T, N * H).

    `qkv` is fp16 or bf16, contiguous, H even and at most 128; the tiles are those of `plan_tiles`. With rotary
    positions, `cos_sin` is fp32 (P, padded H / 2, 2), P a multiple of `BLOCK` that no sequence exceeds; with ALiBi,
    `slopes` is fp32 (N,). The other one is None. Returns the dtype of `qkv`, or fp8 e4m3 with `quantize`, for which
    no value may exceed 448.

    Raises:
        DeviceError: the device lacks resources that a kernel needs.
    """
    _, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty((len(qkv), num_heads * head_dim), dtype=FP8 if quantize else qkv.dtype)
    padded = padded_head_dim(head_dim)
    rotary = cos_sin is not None
    memory = shared_memory(qkv.device)
    # Registers hold all scores of a block of queries for heads of up to 64 columns.
    at_once = rotary and padded <= 64 and memory >= DATACENTER_SHARED_MEMORY
    programs = programs_that_fit(head_dim, memory)
    dims = (num_heads, head_dim, padded, BLOCK)
    shared = (cos_sin, slopes, head_dim**-0.5 * math.log2(math.e), *dims)
    if len(short_tiles):
        launch(
            _short_kernel, len(short_tiles) * num_heads, qkv, out, short_tiles, *shared, rotary, programs > 0,
            at_once, num_warps=4, num_stages=1,
            **register_limit(3 if at_once else programs),  # the queries, keys and values of three fill the shared memory
        )  # fmt: skip
    if len(long_tiles):
        keys = qkv[:, 1]
        if rotary:
            keys = torch.empty_like(keys, memory_format=torch.contiguous_format)
            together = 5  # heads of a program, which loads their angles once
            launch(
                _rotate_keys_kernel, len(long_tiles) * triton.cdiv(num_heads, together), qkv, keys, long_tiles, cos_sin,
                *dims, together, num_warps=4,
            )  # fmt: skip
        launch(
            _long_kernel, len(long_tiles) * num_heads, qkv, keys, out, long_tiles, *shared, keys.stride(0), rotary,
            num_warps=4, num_stages=3, **register_limit(programs),
        )  # fmt: skip
    return out
