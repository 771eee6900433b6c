"""The work of one lane, in the process that it is called in."""

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from virnuc_core.batching.packing import warn_if_inefficient
from virnuc_core.inference.engine import Embedder
from virnuc_core.inference.events import LaneEvent, ModelsLoaded, ShardDone
from virnuc_core.inference.shards import identity_of
from virnuc_core.run_plan import RunFolder, read_plan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.shard_file import ShardCounters, sum_counters, write_shard

_log = logging.getLogger(__name__)


def run_shards(
    folder: RunFolder, indices: Sequence[int], device: str, lane: int, report: Callable[[LaneEvent], None]
) -> None:
    """Loads the models once and commits one shard after another.

    Args:
        folder: the run's folder, with its plan and frame store.
        indices: the shards to compute, in this order.
        device: "cpu" or "cuda:N", as this process sees it.
        lane: number of the lane, for the events.
        report: is told of the loaded models and of every committed shard.

    Raises:
        VirnucError: any of them; what was committed before stays.
    """
    started = time.perf_counter()
    plan = read_plan(folder.plan)
    store = FrameStore.open(folder.frames)
    embedder = Embedder.load(plan, device)
    folder.shards.mkdir(exist_ok=True)
    load_seconds = time.perf_counter() - started
    report(ModelsLoaded(lane=lane, device=device, device_name=_hardware(device), seconds=load_seconds))
    work: list[ShardCounters] = []
    for index in indices:
        shard = plan.shards[index]
        result, seconds = embedder.run(store, shard)
        writing = time.perf_counter()
        write_shard(folder.shard(index), result, identity_of(plan, shard))
        seconds = replace(seconds, write=time.perf_counter() - writing)
        _log.info(
            "lane %d: shard %d of %d, %d rows", lane, index + 1, len(plan.shards), shard.end - shard.begin
        )
        report(ShardDone(lane=lane, shard=index, counters=result.counters, seconds=seconds))
        work.append(result.counters)
    for model in sum_counters(work).models:
        warn_if_inefficient(f"{model.name} ({model.family})", model.packing_efficiency, model.batches)


def _hardware(device: str) -> str:
    return platform.machine() + " CPU" if device == "cpu" else torch.cuda.get_device_name(device)
