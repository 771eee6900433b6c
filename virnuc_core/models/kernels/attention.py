"""Attention over packed tokens that reads the fused QKV buffer, with rotary angles or ALiBi inside.

One program computes one head of one tile. Where tensor cores read both operands from shared memory (data centre GPUs since
Hopper), a sequence of up to `WHOLE_TOKENS` is one tile: its queries, keys and values are loaded and rotated once, and all
scores of a query are there before its softmax. Other sequences are cut into tiles of `BLOCK` queries, each of which
iterates over all keys, rotated once beforehand.

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

BLOCK: Final = 64  # queries of a tile, and keys of a step
WHOLE_TOKENS: Final = 3 * BLOCK


def padded_head_dim(head_dim: int) -> int:
    """Columns of a head in the kernels: a power of two, of at least 16, the fewest that tensor cores multiply."""
    return max(16, triton.next_power_of_2(head_dim))


def takes_whole_sequences(device: torch.device, head_dim: int) -> bool:
    """Whether sequences of up to `WHOLE_TOKENS` are one tile: registers hold their scores beside 64 columns at most."""
    return head_dim <= 64 and shared_memory(device) >= DATACENTER_SHARED_MEMORY


def plan_tiles(cu_seqlens: npt.NDArray[np.int32], *, whole: bool) -> tuple[npt.NDArray[np.int32], ...]:
    """The tiles of sequences, from `cu_seqlens` (B + 1,); with `whole`, short sequences are one tile.

    Returns:
        Two int32 (tiles, 3), first token and length of a sequence, first query of the tile: of whole sequences, and of up to
        `BLOCK` queries.
    """
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    counts = np.where(whole & (lengths <= WHOLE_TOKENS), lengths > 0, -(-lengths // BLOCK))
    firsts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts, lengths = np.repeat(starts, counts), np.repeat(lengths, counts)
    tiles = np.stack((starts, lengths, firsts * BLOCK), axis=1).astype(np.int32)
    is_whole = whole & (lengths <= WHOLE_TOKENS)
    return tiles[is_whole], tiles[~is_whole]


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
def _scores(q, k, rows, keys, slopes, head):
    """Scores of queries at positions `rows` against keys at positions `keys`, in base 2, less the ALiBi penalty."""
    scores = tl.dot(q, tl.trans(k))
    if slopes is not None:
        slope = tl.load(slopes + head) * 1.4426950408889634  # log2(e)
        scores -= slope * tl.abs(rows.to(tl.float32)[:, None] - keys.to(tl.float32)[None, :])
    return scores


@triton.jit
def _store(
    base, rows, length, acc, l_i, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    column = tl.arange(0, PADDED)
    real = (rows < length)[:, None] & (column < HEAD_DIM)[None, :]
    at = base + rows[:, None] * (NUM_HEADS * HEAD_DIM) + column[None, :]
    tl.store(at, (acc * (1.0 / l_i)[:, None]).to(base.dtype.element_ty), mask=real)


@triton.jit
def _attend(
    q, ks, vs, rows, length, slopes, head, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """Weighted sums of the values and sums of the weights of ROWS queries, over all blocks of keys."""
    scores = ()
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for block in tl.static_range(NUM_BLOCKS):
        keys = block * ROWS + tl.arange(0, ROWS)
        block_scores = _scores(q, ks[block], rows, keys, slopes, head)
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
def _whole_sequence(
    qkv, out, length, cos_sin, slopes, head, scale, NUM_BLOCKS: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A sequence of at most NUM_BLOCKS * ROWS tokens.

    The angles of a block are those of the block before, turned by the angles of position ROWS.
    """
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    qs = ()
    ks = ()
    vs = ()
    if cos_sin is not None:
        cos, sin = _angles(cos_sin, tl.arange(0, ROWS), PADDED)
    for block in tl.static_range(NUM_BLOCKS):
        at = block * ROWS + tl.arange(0, ROWS)
        k = _rows(qkv + WIDTH, at, length, STRIDE, HEAD_DIM, PADDED, block < NUM_BLOCKS - 1)
        q = _rows(qkv, at, length, STRIDE, HEAD_DIM, PADDED, block < NUM_BLOCKS - 1)
        v = _rows(qkv + 2 * WIDTH, at, length, STRIDE, HEAD_DIM, PADDED, block < NUM_BLOCKS - 1)
        if cos_sin is not None:
            if block > 0:
                turn_cos, turn_sin = _angles(cos_sin, ROWS + tl.arange(0, 1), PADDED)
                cos, sin = cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin
            q = _rotate(q, cos * scale, sin * scale, PADDED)
            k = _rotate(k, cos, sin, PADDED)
        else:
            q = (q.to(tl.float32) * scale).to(q.dtype)
        qs = qs + (q,)
        ks = ks + (k,)
        vs = vs + (v,)
    for block in tl.static_range(NUM_BLOCKS):
        rows = block * ROWS + tl.arange(0, ROWS)
        acc, l_i = _attend(qs[block], ks, vs, rows, length, slopes, head, NUM_BLOCKS, PADDED, ROWS)
        _store(out, rows, length, acc, l_i, NUM_HEADS, HEAD_DIM, PADDED)


@triton.jit
def _place(tiles, NUM_HEADS: tl.constexpr):
    """This program's head, its sequence's first token and length, and its first query.

    The grid has one dimension, since the others end at 65,535, and heads vary fastest.
    """
    tile = tiles + 3 * (tl.program_id(0) // NUM_HEADS)
    return (
        tl.program_id(0) % NUM_HEADS, tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    )  # fmt: skip


@triton.jit
def _whole_kernel(
    qkv, out, tiles, cos_sin, slopes, scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sequences of at most 3 * ROWS tokens, one a program."""
    head, begin, length, _ = _place(tiles, NUM_HEADS)
    qkv += (begin * (3 * NUM_HEADS) + head) * HEAD_DIM
    out += (begin * NUM_HEADS + head) * HEAD_DIM
    if length <= ROWS:
        _whole_sequence(qkv, out, length, cos_sin, slopes, head, scale, 1, NUM_HEADS, HEAD_DIM, PADDED, ROWS)
    elif length <= 2 * ROWS:
        _whole_sequence(qkv, out, length, cos_sin, slopes, head, scale, 2, NUM_HEADS, HEAD_DIM, PADDED, ROWS)
    else:
        _whole_sequence(qkv, out, length, cos_sin, slopes, head, scale, 3, NUM_HEADS, HEAD_DIM, PADDED, ROWS)


@triton.jit
def _rotate_keys_kernel(
    qkv, tiles, cos_sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Rotates the keys of ROWS tokens and TOGETHER heads by their positions, in place."""
    GROUPS: tl.constexpr = (NUM_HEADS + TOGETHER - 1) // TOGETHER
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    tile = tiles + 3 * (tl.program_id(0) // GROUPS)
    start = tl.load(tile + 2)
    left = tl.load(tile + 1) - start
    keys = qkv + (tl.load(tile).to(tl.int64) + start) * STRIDE + NUM_HEADS * HEAD_DIM
    at = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    real = (at < left)[:, None] & (column < HEAD_DIM)[None, :]
    cos, sin = _angles(cos_sin + start.to(tl.int64) * PADDED, at, PADDED)
    first = tl.program_id(0) % GROUPS * TOGETHER
    for head in range(first, min(first + TOGETHER, NUM_HEADS)):
        own = keys + head * HEAD_DIM
        rows = _rows(own, at, left, STRIDE, HEAD_DIM, PADDED)
        tl.store(own + at[:, None] * STRIDE + column[None, :], _rotate(rows, cos, sin, PADDED), mask=real)


@triton.jit
def _step(scores, v, m_i, l_i, acc):
    """One step of the online softmax, in base 2, from scores against a block of keys."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    weights = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(weights, 1)
    # The product does not accumulate into acc: the assembler would serialise all products around the scaling of acc.
    acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), tl.dot(weights.to(v.dtype), v))
    return m_new, l_i, acc


@triton.jit
def _tile_kernel(
    qkv, out, tiles, cos_sin, slopes, scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a sequence of any length. Its last ROWS keys, the only ones that are masked, come first."""
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    WIDTH: tl.constexpr = NUM_HEADS * HEAD_DIM
    head, begin, length, start = _place(tiles, NUM_HEADS)
    keys = qkv + begin * STRIDE + WIDTH + head * HEAD_DIM
    first_row = begin + start
    out += first_row * WIDTH + head * HEAD_DIM
    at = tl.arange(0, ROWS)
    rows = start + at
    q = _rows(qkv + first_row * STRIDE + head * HEAD_DIM, at, length - start, STRIDE, HEAD_DIM, PADDED)
    if cos_sin is not None:
        cos, sin = _angles(cos_sin + start.to(tl.int64) * PADDED, at, PADDED)
        q = _rotate(q, cos * scale, sin * scale, PADDED)
    else:
        q = (q.to(tl.float32) * scale).to(q.dtype)
    last = (length - 1) // ROWS * ROWS
    block = keys + last.to(tl.int64) * STRIDE
    k = _rows(block, at, length - last, STRIDE, HEAD_DIM, PADDED)
    v = _rows(block + WIDTH, at, length - last, STRIDE, HEAD_DIM, PADDED)
    scores = _scores(q, k, rows, last + at, slopes, head)
    scores = tl.where((last + at < length)[None, :], scores, float("-inf"))
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    m_i, l_i, acc = _step(scores, v, m_i, l_i, acc)
    for first_key in range(0, last, ROWS):
        block = keys + tl.cast(first_key, tl.int64) * STRIDE
        k = _rows(block, at, ROWS, STRIDE, HEAD_DIM, PADDED, True)
        v = _rows(block + WIDTH, at, ROWS, STRIDE, HEAD_DIM, PADDED, True)
        scores = _scores(q, k, rows, first_key + at, slopes, head)
        m_i, l_i, acc = _step(scores, v, m_i, l_i, acc)
    _store(out, at, length - start, acc, l_i, NUM_HEADS, HEAD_DIM, PADDED)


def packed_attention(
    qkv: Tensor,
    tiles: tuple[Tensor, ...],
    cos_sin: Tensor | None,
    slopes: Tensor | None,
    quantize: bool = False,
) -> Tensor:
    """Attention of every token to all tokens of its own sequence: (T, 3, N, H) -> (T, N * H).

    `qkv` is fp16 or bf16, contiguous, H even and at most 128; its keys are overwritten. `tiles` are those of `plan_tiles`.
    With rotary positions, `cos_sin` is fp32 (P, padded H / 2, 2), P a multiple of `BLOCK` that no sequence exceeds; with
    ALiBi, `slopes` is fp32 (N,). The other one is None. Returns the dtype of `qkv`, or fp8 e4m3 with `quantize`, for which
    no value may exceed 448.

    Raises:
        DeviceError: the device lacks resources that a kernel needs.
    """
    _, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty((len(qkv), num_heads * head_dim), dtype=FP8 if quantize else qkv.dtype)
    dims = (num_heads, head_dim, padded_head_dim(head_dim))
    positions = (cos_sin, slopes, head_dim**-0.5 * math.log2(math.e))
    whole, cut = tiles
    if len(whole):
        launch(
            _whole_kernel, len(whole) * num_heads, qkv, out, whole, *positions, *dims, BLOCK,
            num_warps=4, num_stages=1, maxnreg=168,  # the queries, keys and values of three fill the shared memory
        )  # fmt: skip
    if len(cut) and cos_sin is not None:
        together = 5  # heads of a program, which loads their angles once
        programs = len(cut) * triton.cdiv(num_heads, together)
        launch(_rotate_keys_kernel, programs, qkv, cut, cos_sin, *dims, BLOCK, together, num_warps=4)
    if len(cut):
        # Four tiles share the registers of a multiprocessor.
        limit = {"maxnreg": 128} if takes_whole_sequences(qkv.device, head_dim) else {}
        launch(
            _tile_kernel, len(cut) * num_heads, qkv, out, cut, *positions, *dims, BLOCK, num_warps=4, num_stages=3, **limit
        )  # fmt: skip
    return out
