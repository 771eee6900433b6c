"""Shard bounds: row ranges of about equal cost, found block by block in constant memory."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from virnuc_core.columns import Float64, Int64
from virnuc_core.errors import UsageError
from virnuc_core.inference.plan import PlannedModel, Shard
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import ResolvedPrecision

RowWork = Callable[[int, int], tuple[Int64, Float64]]

# A killed run loses up to a shard. On the CPU, models load fast, so shards may be short; on a GPU they should be long
# relative to filling and draining the pipeline.
SHARD_SECONDS: Final = {"cpu": 15.0, "cuda": 60.0}
# A short run has several shards as well: for several GPUs, and so that one is merged while the next is computed.
FEW_SHARDS: Final = 8
LEAST_SECONDS: Final = {"cpu": 15.0, "cuda": 2.0}
# Bounds the memory for a shard's vectors (0.4 GB in fp32 for 768 + 2560, the widest pair in use) and, with cheap models,
# the wait for the first and the last shard. At least twenty batches on a GPU.
MAX_SHARD_ROWS: Final = 32_768
# Bounds the memory for sequences and tokens of up to three shards on the host: 5 bytes per residue, 2 per base. Three
# times the letters of MAX_SHARD_ROWS rows of 500-bp chunks.
MAX_SHARD_LETTERS: Final = 1 << 26


def plan_shards(
    store: FrameStore, models: tuple[PlannedModel, ...], device: str, shard_seconds: float | None = None
) -> tuple[Shard, ...]:
    """Divides the rows of a store into shards, never splitting the frames of a chunk.

    The bounds depend on the sequences, the models and the type of device, not on the number of devices. `shard_seconds` is
    the estimated work per shard; None uses the default for the type of device.
    """
    device_type = device.partition(":")[0]
    most = shard_seconds or SHARD_SECONDS[device_type]
    least = shard_seconds or LEAST_SECONDS[device_type]
    row_work = partial(_row_work, store, models, device)
    return cut_rows(row_work, store.frame_chunk, (MAX_SHARD_ROWS, MAX_SHARD_LETTERS, most), least)


def _row_work(
    store: FrameStore, models: tuple[PlannedModel, ...], device: str, begin: int, end: int
) -> tuple[Int64, Float64]:
    """Letters that the models read of each of the rows begin..end-1, and estimated seconds."""
    is_cpu = device == "cpu"
    # FLOP/s of two CPU cores, and of one H200 by benchmarks/results/forward_*.json.
    speeds: dict[ResolvedPrecision, float] = {"fp32": 3e13, "fp16": 5e14, "bf16": 5e14, "fp8": 8e14}
    letters = np.zeros(end - begin, np.int64)
    seconds = np.full(end - begin, 2e-5)  # tokenizing, packing, writing
    for model in models:
        spec, is_protein = model.spec, model.family == "esm2"
        column = store.protein if is_protein else store.dna
        if column is None:
            raise UsageError(f"model {model.name} ({model.family}) cannot read this kind of sequence.")
        lengths = column.rows(begin, end).lengths
        letters += lengths
        num_tokens = lengths / (1.0 if is_protein else 4.8) + 2  # with the special ones
        width, ffn_matrices = spec.embedding_dim, 2 if is_protein else 3
        per_token = 2 * (4 * width * width + ffn_matrices * width * spec.ffn_dim) + 4 * width * num_tokens
        seconds += spec.num_layers * num_tokens * per_token / (5e10 if is_cpu else speeds[model.precision])
        if model.token_budget == 1 and not is_cpu:
            seconds += spec.num_layers * 5e-4  # launch-bound, whatever the length
    return letters, seconds


def _group_ends(row_work: RowWork, groups: Int64, block_rows: int) -> Iterator[Float64]:
    """Rows, letters and seconds up to the end of each group of rows, float64 (3, g), in blocks."""
    total: Float64 = np.zeros((3, 1))
    for begin in range(0, len(groups), block_rows):
        letters, seconds = row_work(begin, min(begin + block_rows, len(groups)))
        work = np.stack((np.ones(len(letters)), letters, seconds))
        until: Float64 = np.concatenate((total, work), axis=1).cumsum(axis=1)[:, 1:]
        total = until[:, -1:]
        own = groups[begin : begin + block_rows + 1]
        is_end = np.append(own[1:] != own[:-1], True)[: len(letters)]
        yield np.ascontiguousarray(until[:, is_end])


def cut_rows(
    row_work: RowWork,
    groups: Int64,
    limits: tuple[int, int, float],
    least: float = math.inf,
    *,
    block_rows: int = 1 << 20,
) -> tuple[Shard, ...]:
    """Divides rows into contiguous shards of about equal cost that cover all rows; a group is never split.

    `row_work` gives letters and estimated seconds of each of the rows begin..end-1; `groups`, int64 (n,), ascending, is the
    group of each row; `limits` are the maximum rows, letters and seconds of a shard, unless a single group exceeds them. There
    are at least `FEW_SHARDS` unless they would then take less than `least` seconds each.
    """
    total = np.zeros(3)
    for ends in _group_ends(row_work, groups, block_rows):
        total = ends[:, -1] if ends.size else total
    share = total[2] / max(1, np.ceil(total / limits).max(), min(FEW_SHARDS, total[2] // least))
    bounds = [np.zeros(3)]
    end = bounds[0]
    for ends in _group_ends(row_work, groups, block_rows):
        taken = 0
        while taken < len(ends[0]):
            begin = bounds[-1]
            # At multiples of the share, so that shortfalls do not accumulate.
            num_shares = max(len(bounds) - 1, int(begin[2] / share + 1e-9) if share else 0) + 1
            limit = begin + limits
            limit[2] = min(num_shares * share, limit[2]) * (1 + 1e-9)
            fitting = min(int(np.searchsorted(*pair, side="right")) for pair in zip(ends, limit, strict=True))
            if fitting > taken:
                end, taken = ends[:, fitting - 1].copy(), fitting
            if taken == len(ends[0]):
                break
            if end is begin:  # not even one group fits
                end, taken = ends[:, taken].copy(), taken + 1
            bounds.append(end)
    if end is not bounds[-1]:
        bounds.append(end)
    return tuple(
        Shard(index=i, begin=int(begin[0]), end=int(end[0]), cost=round(float(end[2] - begin[2]), 6))
        for i, (begin, end) in enumerate(pairwise(bounds))
    )
