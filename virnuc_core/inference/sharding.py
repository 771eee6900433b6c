"""Where the shards of a run begin and end: ranges of rows that cost about the same."""

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.errors import UsageError
from virnuc_core.run_plan import PlannedModel, Shard
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import ModelSpec, ResolvedPrecision

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
# What a row costs besides arithmetic: tokenizing, packing, writing.
_SECONDS_PER_ROW: Final = 2e-5
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
    costs = _row_seconds(store, models, device)
    target = shard_seconds or SHARD_SECONDS[device.partition(":")[0]]
    return cut_rows(costs, store.frame_chunk, target, MAX_SHARD_ROWS)


def with_costs(
    shards: tuple[Shard, ...], store: FrameStore, models: tuple[PlannedModel, ...], device: str
) -> tuple[Shard, ...]:
    """The same shards of a store with the work that other models would have with them.

    Raises:
        UsageError: a model cannot read the kind of sequence in the store.
    """
    until = _sums(_row_seconds(store, models, device))
    return tuple(
        replace(shard, cost=round(float(until[shard.end] - until[shard.begin]), 6)) for shard in shards
    )


def _row_seconds(store: FrameStore, models: tuple[PlannedModel, ...], device: str) -> npt.NDArray[np.float64]:
    """Estimated seconds of each row.

    Raises:
        UsageError: a model cannot read the kind of sequence in the store.
    """
    kind = device.partition(":")[0]
    seconds = np.full(store.num_frames, _SECONDS_PER_ROW)
    for model in models:
        column = store.protein if model.family == "esm2" else store.dna
        if column is None:
            raise UsageError(f"model {model.name} ({model.family}) cannot read this kind of sequence.")
        letters = column.lengths / (1.0 if model.family == "esm2" else _BASES_PER_TOKEN)
        seconds += _flops(model.spec, letters + _SPECIAL_TOKENS) / _FLOPS[kind][model.precision]
        if model.engine == "reference":
            seconds += model.spec.num_layers * _SECONDS_PER_LAYER_ALONE[kind]
    return seconds


def cut_rows(
    costs: npt.NDArray[np.float64], groups: npt.NDArray[np.int64], target_cost: float, max_rows: int
) -> tuple[Shard, ...]:
    """Cuts rows into contiguous shards of about equal cost; a group of rows is never cut.

    Args:
        costs: float64 (n,), estimated seconds of each row.
        groups: int64 (n,), ascending; rows of one group (the frames of a chunk) stay together.
        target_cost: seconds that a shard should take at most, a single group apart.
        max_rows: most rows in a shard, a single group apart.

    Returns:
        Shards that cover all rows in order; none for no rows.
    """
    if len(costs) == 0:
        return ()
    starts = np.concatenate(([0], np.flatnonzero(np.diff(groups)) + 1, [len(groups)]))
    until = _sums(costs)[starts]
    shards: list[Shard] = []
    num_wanted = max(1, int(np.ceil(until[-1] / target_cost)), -(-len(costs) // max_rows))
    share = float(until[-1]) / num_wanted
    first = 0
    while first < len(starts) - 1:
        # At whole shares of the total, so that what one shard falls short of does not add up.
        shares = max(len(shards), int(float(until[first]) / share + 1e-9) if share else 0) + 1
        limit = min(shares * share, float(until[first]) + target_cost)
        by_cost = int(np.searchsorted(until, limit * (1 + 1e-9), side="right")) - 1
        by_rows = int(np.searchsorted(starts, starts[first] + max_rows, side="right")) - 1
        last = max(first + 1, min(by_cost, by_rows))
        cost = round(float(until[last] - until[first]), 6)
        shards.append(Shard(index=len(shards), begin=int(starts[first]), end=int(starts[last]), cost=cost))
        first = last
    return tuple(shards)


def _sums(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """float64 (n + 1,): the costs of the first i rows."""
    return np.concatenate(([0.0], np.cumsum(costs)))


def _flops(spec: ModelSpec, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Floating-point operations of one sequence: matrix products and attention."""
    width, ffn_matrices = spec.embedding_dim, 2 if spec.family == "esm2" else 3
    per_token = 2 * (4 * width * width + ffn_matrices * width * spec.ffn_dim)
    return spec.num_layers * num_tokens * (per_token + 4 * width * num_tokens)
