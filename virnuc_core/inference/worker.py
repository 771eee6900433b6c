"""The work of a lane, in the current process."""

import logging
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from virnuc_core.batching.packing import warn_if_inefficient
from virnuc_core.files import make_folder
from virnuc_core.inference.device import on_device
from virnuc_core.inference.events import LaneEvent, ModelsLoaded, ShardDone
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.prefetch import Collator
from virnuc_core.inference.runner import ComputedShard, InferenceRunner, LoadedModels
from virnuc_core.inference.shard import CommitGuard, ShardCounters, shard_identity, sum_counters, write_shard
from virnuc_core.prefetcher import Prefetcher
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore

_log = logging.getLogger(__name__)


def run_shards(
    folder: RunFolder,
    indices: Sequence[int],
    models: LoadedModels,
    lane: int,
    emit: Callable[[LaneEvent], None],
) -> None:
    """Loads the models that are not loaded yet, and commits one shard after another.

    Two threads run alongside: one collates the next shards, also while models load; the other writes finished shards and
    emits `ShardDone`. Both end before this returns.

    Raises:
        MismatchError: the run was started over meanwhile.
        HostError: the plan is of another release series.
        VirnucError: any failure in any of the threads; committed shards stay.
        OSError: a shard cannot be written.
    """
    plan = read_plan(folder.plan)
    plan.require_own_series()
    started = time.perf_counter()
    collator = Collator.load(plan, FrameStore.open(folder.frames), models.streams)
    make_folder(folder.shards)
    guard = CommitGuard(folder, plan)

    def commit(computed: ComputedShard) -> ShardCounters:
        result, shard = computed.result(), computed.shard
        begun = time.perf_counter()
        is_wanted = partial(guard.require_planned, shard)
        write_shard(folder.shard(shard.index), result, shard_identity(plan, shard), is_wanted)
        seconds = replace(computed.seconds, write=time.perf_counter() - begun)
        rows = shard.end - shard.begin
        _log.debug("lane %d: shard %d of %d, %d rows", lane, shard.index + 1, len(plan.shards), rows)
        emit(ShardDone(lane=lane, shard=shard.index, rows=rows, counters=result.counters, seconds=seconds))
        return result.counters

    shards = [plan.shards[index] for index in indices]
    with (
        on_device(models.device),
        # Shards held on the host at once: token ids are small, vectors take up to 1 GB per shard.
        Prefetcher(collator.collate, shards, depth=2) as inputs,
    ):
        models.load(plan)
        is_cpu = models.streams.device.type == "cpu"
        hardware = f"{platform.machine()} CPU" if is_cpu else torch.cuda.get_device_name(models.device)
        seconds = time.perf_counter() - started
        emit(ModelsLoaded(lane=lane, device=models.device, device_name=hardware, seconds=seconds))
        with (
            closing(InferenceRunner(plan, models).run(inputs)) as computed,
            Prefetcher(commit, computed, depth=1) as committed,
        ):
            work = list(committed)
    for model in sum_counters(work).models:
        warn_if_inefficient(f"{model.name} ({model.family})", model.packing_efficiency, model.batches)
