"""A whole benchmark: every model in every precision, by forward passes and from stored sequences to shards."""

import gc
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch

from virnuc_core.benchmark.forward import measure_forward
from virnuc_core.benchmark.report import Json, machine, speed
from virnuc_core.benchmark.settings import BenchSettings, Lengths
from virnuc_core.benchmark.synthetic import draw_lengths, random_sequences, write_fasta
from virnuc_core.files import write_text
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneEvent, LaneReport, ModelsLoaded
from virnuc_core.inference.launcher import assign_shards, run_lane
from virnuc_core.inference.plan import PlannedModel, RunPlan, write_plan
from virnuc_core.inference.planning import make_plan, plan_models
from virnuc_core.inference.shard import sum_counters
from virnuc_core.models.compilation import resolve_compile_mode
from virnuc_core.models.hub import family_of
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Alphabet, Precision

# Several, so that the end of a shard is measured too, and equally many for every lane.
_SHARDS_PER_LANE: Final = 2
_ROUNDING: Final = 1 + 1e-6

_log = logging.getLogger(__name__)


def run_benchmark(settings: BenchSettings, command: str) -> Json:
    """Measures everything requested, records `command`, and writes `settings.out` after every model.

    Raises:
        VirnucError: a model, device or setting cannot be used.
    """
    devices = resolve_devices(tuple(settings.devices.split(",")))
    if devices[0] != "cpu":
        torch.cuda.set_device(devices[0])
    result: Json = {
        "command": command,
        "machine": machine(devices[0]),
        "cases": [],
        "date": datetime.now(UTC).date().isoformat(),
        "kind": "bench",
        "schema_version": 1,
    }
    for model in settings.model:
        for precision in settings.precisions:
            planned, config = _plan_model(model, cast(Precision, precision), settings, devices)
            cases = measure_forward(model, planned, settings, devices[0])
            # torch.compile keeps a limited number of graphs and then stops compiling.
            if planned.compile_mode != "none":
                torch.compiler.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if settings.end_to_end is not None:
                for case in cases:
                    case["end_to_end"] = _end_to_end(case, planned, config, devices, settings)
            result["cases"] += cases
            if settings.out is not None:
                write_text(Path(settings.out), json.dumps(result, indent=1) + "\n")
    return result


def device_groups(devices: Sequence[str], *, scaling: bool) -> list[tuple[str, ...]]:
    """The devices to use at once: all, or, for `scaling`, the first 1, 2, 4, ... and all."""
    counts = {len(devices)}
    if scaling:
        counts |= {1 << power for power in range(len(devices).bit_length()) if 1 << power <= len(devices)}
    return [tuple(devices[:count]) for count in sorted(counts)]


def _plan_model(
    model: str, precision: Precision, settings: BenchSettings, devices: tuple[str, ...]
) -> tuple[PlannedModel, RunConfig]:
    """How a run with these settings would compute the model, and the settings with nothing left on "auto"."""
    family, name = family_of(model)
    config = RunConfig(
        chunk_length=None,
        esm_model=name if family == "esm2" else None,
        dnabert_model=name if family == "dnabert_s" else None,
        precision=precision,
        devices=tuple(settings.devices.split(",")),
        token_budget=settings.token_budget,
        attention=settings.attention,
    )
    [planned] = plan_models(config, devices, None)
    mode = resolve_compile_mode(settings.compile_mode, planned.attention, math.inf)
    planned = replace(planned, compile_mode=mode)
    return planned, config.model_copy(update={"token_budget": planned.token_budget, "compile_mode": mode})


def _end_to_end(
    case: Json, planned: PlannedModel, config: RunConfig, devices: Sequence[str], settings: BenchSettings
) -> list[Json]:
    """Runs on every group of devices, with forward fraction and scaling efficiency."""
    runs: list[Json] = []
    assert settings.end_to_end is not None
    for group in device_groups(devices, scaling=settings.scaling):
        num_sequences = round(case["forward"]["sequences_per_second"] * settings.end_to_end)
        run = _measure_lanes(case["lengths"], planned, config, group, num_sequences, settings.repeats)
        rate = run["speed"]["tokens_per_second"] / len(group)
        one_device = runs[0] if runs and len(runs[0]["devices"]) == 1 else None
        run["over_gpu_only"] = rate / case["forward"]["tokens_per_second"]  # the forward fraction
        # The scaling efficiency.
        run["over_linear"] = None if one_device is None else rate / one_device["speed"]["tokens_per_second"]
        runs.append(run)
        _log.info(
            "%s %s %s end to end on %d: %.0f tokens/s",
            *(case["model"], case["precision"], case["lengths"], len(group)),
            run["speed"]["tokens_per_second"],
        )
    return runs


def _measure_lanes(
    lengths: str,
    planned: PlannedModel,
    config: RunConfig,
    devices: Sequence[str],
    sequences_per_device: int,
    repeats: int,
) -> Json:
    """From stored sequences to shards on several devices at once, each with the same share of work.

    A lane is timed from its loaded models to its last shard, and the slowest lane counts.
    """
    with tempfile.TemporaryDirectory(prefix="virnuc-bench-") as scratch:
        folder = RunFolder(Path(scratch))
        count = max(_SHARDS_PER_LANE, sequences_per_device) * len(devices)
        store = _make_store(folder, planned, Lengths.parse(lengths), count)
        plan = _plan_even_shards(config, store, folder, devices)
        runs = [_run_lanes(folder, plan, devices) for _ in range(repeats)]
    slowest = [max(seconds for _, seconds in run) for run in runs]
    work = sum_counters(shard.counters for report, _ in runs[0] for shard in report.shards)
    [model] = work.models
    return {
        "devices": list(devices),
        "speed": speed(
            [model.tokens / seconds for seconds in slowest],
            tokens=model.tokens,
            sequences=work.frames,
            letters=work.residues + work.bases,
            packing_efficiency=model.packing_efficiency,
        ),
        "load_seconds": statistics.median(max(report.load_seconds for report, _ in run) for run in runs),
        "over_gpu_only": None,
        "over_linear": None,
        "work_seconds": slowest,
    }


def _make_store(folder: RunFolder, planned: PlannedModel, lengths: Lengths, count: int) -> FrameStore:
    rng = np.random.default_rng(1)
    fasta = folder.root / "sequences.fa"
    write_fasta(fasta, random_sequences(planned.family, draw_lengths(lengths, count, rng), rng))
    alphabet: Alphabet = "protein" if planned.family == "esm2" else "dna"
    store = build_frame_store([fasta], folder.frames, None, alphabet)
    fasta.unlink()
    return store


def _plan_even_shards(
    config: RunConfig, store: FrameStore, folder: RunFolder, devices: Sequence[str]
) -> RunPlan:
    cost = sum(shard.cost for shard in make_plan(config, store, "embed", tuple(devices)).shards)
    share = cost / (_SHARDS_PER_LANE * len(devices)) * _ROUNDING
    plan = make_plan(config.model_copy(update={"shard_seconds": share}), store, "embed", tuple(devices))
    write_plan(folder.plan, plan)
    return plan


def _run_lanes(folder: RunFolder, plan: RunPlan, devices: Sequence[str]) -> list[tuple[LaneReport, float]]:
    """Computes all shards and deletes them; report and seconds of work of each lane."""
    assigned = assign_shards(plan, range(len(plan.shards)), len(devices))

    def work(lane: int) -> tuple[LaneReport, float]:
        loaded = last = 0.0

        def on_event(event: LaneEvent) -> None:
            nonlocal loaded, last
            last = time.perf_counter()
            if isinstance(event, ModelsLoaded):
                loaded = last

        report = run_lane(
            folder, assigned[lane], devices[lane], lane=lane, num_lanes=len(assigned), on_event=on_event
        )
        return report, last - loaded

    with ThreadPoolExecutor(len(assigned)) as threads:
        measured = list(threads.map(work, range(len(assigned))))
    for shard in plan.shards:
        folder.shard(shard.index).unlink()
    return measured
