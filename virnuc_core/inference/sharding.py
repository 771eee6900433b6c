"""Where the shards of a run begin and end: ranges of rows that cost about the same.

Rows are gone through in blocks, so that memory does not grow with their number.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from virnuc_core.errors import UsageError
from virnuc_core.inference.plan import PlannedModel, Shard
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import ModelSpec, ResolvedPrecision

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.int64)

# What a device does in a second: two CPU cores; one H200, by benchmarks/results/forward_*.json.
_FLOPS: Final[dict[str, dict[ResolvedPrecision, float]]] = {
    "cpu": {"fp32": 5e10, "bf16": 5e10},
    "cuda": {"fp32": 3e13, "fp16": 5e14, "bf16": 5e14, "fp8": 8e14},
}
# One sequence at a time leaves a GPU waiting for the launches of a layer, whatever the sequence is.
_SECONDS_PER_LAYER_ALONE: Final = {"cpu": 0.0, "cuda": 5e-4}
# A shard is what a killed run loses. On the CPU models load in no time, so it may be short; on a GPU it
# should be long against the ends of its pipeline.
SHARD_SECONDS: Final = {"cpu": 15.0, "cuda": 60.0}
# Bounds the memory for the vectors of a shard, 0.4 GB in fp32 for the widest pair in use, 768 + 2560, and the
# first and the last shard of a cheap model, for which a lane waits. Twenty batches or more on a GPU.
MAX_SHARD_ROWS: Final = 32_768
# Bounds the memory for its sequences and tokens, of which up to three shards are on the host: 5 bytes a residue, 2 a
# base. Three times what the most rows of 500-bp chunks have.
MAX_SHARD_LETTERS: Final = 1 << 26
# What a row costs besides arithmetic: tokenizing, packing, writing.
_SECONDS_PER_ROW: Final = 2e-5
_BLOCK_ROWS: Final = 1 << 20
_BASES_PER_TOKEN: Final = 4.8
_SPECIAL_TOKENS: Final = 2


def plan_shards(
    store: FrameStore, models: tuple[PlannedModel, ...], device: str, shard_seconds: float | None = None
) -> tuple[Shard, ...]:
    """Cuts the rows of a store into shards; the frames of a chunk are never parted.

    The bounds depend on the sequences, the models and the kind of device, not on how many there are.

    Args:
        store: the frame store of the inputs.
        models: what will run on every row.
        device: a device of the kind that will be used.
        shard_seconds: estimated work in a shard, in seconds; None is by the kind of device.

    Raises:
        UsageError: a model cannot read the kind of sequence in the store, or the size is not positive.
    """
    if shard_seconds is not None and not 0 < shard_seconds < np.inf:
        raise UsageError(f"--shard-seconds {shard_seconds} cannot be used: give a number above 0.")
    return cut_rows(
        partial(_row_seconds, store, models, device),
        partial(_row_letters, store, models),
        store.frame_chunk,
        shard_seconds or SHARD_SECONDS[device.partition(":")[0]],
        max_rows=MAX_SHARD_ROWS,
        max_letters=MAX_SHARD_LETTERS,
    )


def with_costs(
    shards: tuple[Shard, ...], store: FrameStore, models: tuple[PlannedModel, ...], device: str
) -> tuple[Shard, ...]:
    """The same shards of a store with the work that other models would have with them.

    Raises:
        UsageError: a model cannot read the kind of sequence in the store.
    """
    ends = np.array([shard.end for shard in shards], np.int64)
    until: list[float] = []
    for begin, costs in _running_sums(partial(_row_seconds, store, models, device), store.num_frames):
        own = ends[(ends > begin) & (ends <= begin + len(costs))]
        until += costs[own - begin - 1].tolist()
    return tuple(
        replace(shard, cost=round(end - begin, 6))
        for shard, (begin, end) in zip(shards, pairwise([0.0, *until]), strict=True)
    )


def _row_seconds(
    store: FrameStore, models: tuple[PlannedModel, ...], device: str, begin: int, end: int
) -> Float64:
    """Estimated seconds of each of the rows begin..end-1.

    Raises:
        UsageError: a model cannot read the kind of sequence in the store.
    """
    kind = device.partition(":")[0]
    seconds = np.full(end - begin, _SECONDS_PER_ROW)
    for model in models:
        column = store.protein if model.family == "esm2" else store.dna
        if column is None:
            raise UsageError(f"model {model.name} ({model.family}) cannot read this kind of sequence.")
        letters = column.rows(begin, end).lengths / (1.0 if model.family == "esm2" else _BASES_PER_TOKEN)
        seconds += _flops(model.spec, letters + _SPECIAL_TOKENS) / _FLOPS[kind][model.precision]
        if model.engine == "reference":
            seconds += model.spec.num_layers * _SECONDS_PER_LAYER_ALONE[kind]
    return seconds


def _row_letters(store: FrameStore, models: tuple[PlannedModel, ...], begin: int, end: int) -> Int64:
    """Residues and bases that the models read of each of the rows begin..end-1."""
    letters = np.zeros(end - begin, np.int64)
    for model in models:
        if (column := store.protein if model.family == "esm2" else store.dna) is not None:
            letters += column.rows(begin, end).lengths
    return letters


class _Place(NamedTuple):
    """A place between two rows: rows, letters and seconds of work before it."""

    row: int
    letters: int
    cost: float


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Where the groups of a block of rows end: int64 (g,), int64 (g,) and float64 (g,), see `_Place`."""

    row: Int64
    letters: Int64
    cost: Float64

    def num_within(self, limit: _Place) -> int:
        """How many of them lie at or before a place, in every respect."""
        columns = (self.row, self.letters, self.cost)
        return int(min(np.searchsorted(*pair, side="right") for pair in zip(columns, limit, strict=True)))

    def __getitem__(self, index: int) -> _Place:
        return _Place(int(self.row[index]), int(self.letters[index]), float(self.cost[index]))

    def __len__(self) -> int:
        return len(self.row)


def cut_rows(
    costs_of: Callable[[int, int], Float64],
    letters_of: Callable[[int, int], Int64],
    groups: Int64,
    target_cost: float,
    *,
    max_rows: int,
    max_letters: int,
    block_rows: int = _BLOCK_ROWS,
) -> tuple[Shard, ...]:
    """Cuts rows into contiguous shards of about equal cost; a group of rows is never cut.

    Args:
        costs_of: gives the estimated seconds of each of the rows begin..end-1.
        letters_of: gives their letters.
        groups: int64 (n,), ascending; rows of one group (the frames of a chunk) stay together.
        target_cost: seconds that a shard should take at most, a single group apart.
        max_rows: most rows in a shard, a single group apart.
        max_letters: most letters in a shard, a single group apart.
        block_rows: rows that are looked at at once; changes nothing but memory and time.

    Returns:
        Shards that cover all rows in order; none for no rows.
    """

    def blocks() -> Iterator[tuple[int, Float64, Int64]]:
        costs = _running_sums(costs_of, len(groups), block_rows)
        letters = _running_sums(letters_of, len(groups), block_rows)
        for (begin, cost), (_, letter) in zip(costs, letters, strict=True):
            yield begin, cost, letter

    total, total_letters = 0.0, 0
    for _, costs, letters in blocks():
        total, total_letters = float(costs[-1]), int(letters[-1])
    by_size = max(-(-len(groups) // max_rows), -(-total_letters // max_letters))
    num_wanted = max(1, math.ceil(total / target_cost), by_size)
    cutter = _Cutter(total / num_wanted, _Place(max_rows, max_letters, target_cost))
    for begin, costs, letters in blocks():
        own = groups[begin : begin + len(costs) + 1]
        following = own[1:] if len(own) > len(costs) else np.append(own[1:], -1)
        ends = np.flatnonzero(own[: len(costs)] != following)
        cutter.add(_Bounds(begin + ends + 1, letters[ends], costs[ends]))
    return cutter.finish()


class _Cutter:
    """Shards, from the ends of one block of groups after another.

    Args:
        share: what each shard would cost if all were equal.
        most: what a shard may have.
    """

    def __init__(self, share: float, most: _Place) -> None:
        self._share = share
        self._most = most
        self._shards: list[Shard] = []
        self._begin = self._fitting = _Place(0, 0, 0.0)  # of the shard, and of its last end that fits

    def add(self, bounds: _Bounds) -> None:
        """Takes in the next block."""
        taken = 0
        while taken < len(bounds):
            fits = bounds.num_within(self._limit())
            if fits > taken:
                self._fitting = bounds[fits - 1]
            taken = max(taken, fits)
            if taken == len(bounds):
                return
            if self._fitting == self._begin:  # not even one group fits
                self._fitting = bounds[taken]
                taken += 1
            self._end_shard()

    def finish(self) -> tuple[Shard, ...]:
        """All shards."""
        if self._fitting != self._begin:
            self._end_shard()
        return tuple(self._shards)

    def _limit(self) -> _Place:
        """Where this shard must have ended."""
        begin, most = self._begin, self._most
        # At whole shares of the total, so that what one shard falls short of does not add up.
        shares = max(len(self._shards), int(begin.cost / self._share + 1e-9) if self._share else 0) + 1
        cost = min(shares * self._share, begin.cost + most.cost) * (1 + 1e-9)
        return _Place(begin.row + most.row, begin.letters + most.letters, cost)

    def _end_shard(self) -> None:
        begin, end = self._begin, self._fitting
        cost = round(end.cost - begin.cost, 6)
        self._shards.append(Shard(index=len(self._shards), begin=begin.row, end=end.row, cost=cost))
        self._begin = self._fitting


def _running_sums(
    values_of: Callable[[int, int], npt.NDArray[Number]], num_rows: int, block_rows: int = _BLOCK_ROWS
) -> Iterator[tuple[int, npt.NDArray[Number]]]:
    """The first row of each block, and (b,), the sum over all rows until the end of each of its rows."""
    total = values_of(0, 0).sum()
    for begin in range(0, num_rows, block_rows):
        values = values_of(begin, min(begin + block_rows, num_rows))
        until = np.cumsum(np.concatenate(([total], values)))[1:]
        total = until[-1]
        yield begin, until


def _flops(spec: ModelSpec, num_tokens: Float64) -> Float64:
    """Floating-point operations of one sequence: matrix products and attention."""
    width, ffn_matrices = spec.embedding_dim, 2 if spec.family == "esm2" else 3
    per_token = 2 * (4 * width * width + ffn_matrices * width * spec.ffn_dim)
    return spec.num_layers * num_tokens * (per_token + 4 * width * num_tokens)
