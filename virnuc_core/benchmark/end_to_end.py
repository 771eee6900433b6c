"""The whole way: sequences in a frame store, processes on the devices, shards on the disk."""

import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from virnuc_core.benchmark.made_sequences import draw_lengths, random_sequences, write_fasta
from virnuc_core.benchmark.results import Case, EndToEnd, Speed, speed_of
from virnuc_core.benchmark.settings import Lengths
from virnuc_core.inference.events import LaneEvent, LaneReport, ModelsLoaded
from virnuc_core.inference.launcher import deal_shards, run_lane
from virnuc_core.inference.planning import make_plan
from virnuc_core.inference.shard import sum_counters
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import PlannedModel, RunPlan, write_plan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Alphabet

# Enough that the end of a shard is part of what is measured, and that every lane gets the same number.
_SHARDS_A_LANE: Final = 2
_ROUNDING: Final = 1 + 1e-6

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LaneTime:
    """One lane: its report, and the seconds from its loaded models to its last shard."""

    report: LaneReport
    work_seconds: float


def measure_end_to_end(
    case: Case,
    planned: PlannedModel,
    config: RunConfig,
    devices: Sequence[str],
    *,
    seconds: float,
    repeats: int,
) -> EndToEnd:
    """Measures one model on some devices at once, each with the same share of work.

    Args:
        case: what its forward passes alone do, which decides how much work there is.
        planned: the model.
        config: settings of the run, nothing left open.
        devices: one lane each.
        seconds: of work on each device at the speed of forward passes alone.
        repeats: how often the run is done.

    Raises:
        VirnucError: a lane fails.
    """
    with tempfile.TemporaryDirectory(prefix="virnuc-bench-") as scratch:
        folder = RunFolder(Path(scratch))
        count = max(_SHARDS_A_LANE, round(case.forward.sequences_per_second * seconds)) * len(devices)
        store = _make_store(folder, planned, Lengths.parse(case.lengths), count)
        plan = _plan(config, store, folder, devices)
        runs = [_run_lanes(folder, plan, devices) for _ in range(repeats)]
    slowest = [max(lane.work_seconds for lane in run) for run in runs]
    speed = _speed(runs[0], slowest)
    _log.info(
        "%s %s %s end to end on %d: %.0f tokens/s",
        *(case.model, case.precision, case.lengths, len(devices), speed.tokens_per_second),
    )
    return EndToEnd(
        devices=tuple(devices),
        speed=speed,
        load_seconds=statistics.median(max(lane.report.load_seconds for lane in run) for run in runs),
        over_gpu_only=speed.tokens_per_second / (len(devices) * case.forward.tokens_per_second),
        over_linear=None,
        work_seconds=tuple(slowest),
    )


def over_linear(run: EndToEnd, one_device: EndToEnd | None) -> EndToEnd:
    """The same, with its speed over that of one device times the number of devices."""
    if one_device is None or len(run.devices) == 1:
        return run
    linear = len(run.devices) * one_device.speed.tokens_per_second
    return replace(run, over_linear=run.speed.tokens_per_second / linear)


def device_groups(devices: Sequence[str], *, scaling: bool) -> list[tuple[str, ...]]:
    """The devices to be used at once: all, or, for `scaling`, the first 1, 2, 4, ... and all."""
    counts = {len(devices)}
    if scaling:
        counts |= {1 << power for power in range(len(devices).bit_length()) if 1 << power <= len(devices)}
    return [tuple(devices[:count]) for count in sorted(counts)]


def _make_store(folder: RunFolder, planned: PlannedModel, lengths: Lengths, count: int) -> FrameStore:
    rng = np.random.default_rng(1)
    fasta = folder.root / "sequences.fa"
    write_fasta(fasta, random_sequences(planned.family, draw_lengths(lengths, count, rng), rng))
    alphabet: Alphabet = "protein" if planned.family == "esm2" else "dna"
    store = build_frame_store([fasta], folder.frames, None, alphabet)
    fasta.unlink()
    return store


def _plan(config: RunConfig, store: FrameStore, folder: RunFolder, devices: Sequence[str]) -> RunPlan:
    """A plan whose shards can be dealt out evenly."""
    whole = make_plan(config, store, "embed", tuple(devices))
    cost = sum(shard.cost for shard in whole.shards)
    share = cost / (_SHARDS_A_LANE * len(devices)) * _ROUNDING
    plan = make_plan(config.model_copy(update={"shard_seconds": share}), store, "embed", tuple(devices))
    write_plan(folder.plan, plan)
    return plan


def _run_lanes(folder: RunFolder, plan: RunPlan, devices: Sequence[str]) -> list[_LaneTime]:
    """Computes all shards and removes them again."""
    dealt = deal_shards(plan, range(len(plan.shards)), len(devices))
    with ThreadPoolExecutor(len(dealt)) as lanes:
        futures = [
            lanes.submit(_run_lane, folder, indices, device, lane, len(dealt))
            for lane, (indices, device) in enumerate(zip(dealt, devices, strict=True))
        ]
        times = [future.result() for future in futures]
    for shard in plan.shards:
        folder.shard(shard.index).unlink()
    return times


def _run_lane(folder: RunFolder, indices: Sequence[int], device: str, lane: int, num_lanes: int) -> _LaneTime:
    loaded = last = 0.0

    def on_event(event: LaneEvent) -> None:
        nonlocal loaded, last
        last = time.perf_counter()
        if isinstance(event, ModelsLoaded):
            loaded = last

    report = run_lane(folder, indices, device, lane=lane, num_lanes=num_lanes, on_event=on_event)
    return _LaneTime(report, last - loaded)


def _speed(run: Sequence[_LaneTime], slowest: Sequence[float]) -> Speed:
    """The rate over all lanes; every repeat does the same work."""
    work = sum_counters(shard.counters for lane in run for shard in lane.report.shards)
    [model] = work.models
    return speed_of(
        [model.tokens / seconds for seconds in slowest],
        model.tokens,
        work.frames,
        work.residues + work.bases,
        model.packing_efficiency,
    )
