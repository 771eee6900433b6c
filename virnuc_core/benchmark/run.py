"""A whole benchmark: every model in every precision, by forward passes and from stored sequences to shards."""

import gc
import json
import logging
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch

from virnuc_core import __version__
from virnuc_core.benchmark.forward import Json, Work, measure_forward
from virnuc_core.benchmark.settings import BenchSettings, Lengths
from virnuc_core.benchmark.synthetic import draw_lengths, random_sequences, write_fasta
from virnuc_core.files import write_text
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneEvent, LaneReport, ModelsLoaded
from virnuc_core.inference.launcher import assign_shards, run_lane
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import PlannedModel, RunPlan, write_plan
from virnuc_core.inference.planning import make_plan, plan_models
from virnuc_core.inference.shard import sum_counters
from virnuc_core.models.compilation import resolve_compile_mode
from virnuc_core.models.hub import family_of
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Precision
from virnuc_core.versions import installed_version

# Several, so that the end of a shard is measured too, and equally many for every lane.
_SHARDS_PER_LANE: Final = 2
_ROUNDING: Final = 1 + 1e-6
_HEADER: Final = (
    *("model", "precision", "lengths", "measured", "tokens/s", "letters/s", "sequences/s"),
    *("over", "ratio", "memory GB", "packed"),
)

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


def machine(device: str) -> Json:
    """Hardware and versions that a result depends on; those of the GPU as far as nvidia-smi reports them."""
    found: Json = {
        "virnuc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "triton": installed_version("triton") or None,
        "cuda": torch.version.cuda,
    }
    if device == "cpu":
        return {**found, "device": f"{platform.machine()} CPU", "threads": torch.get_num_threads()}
    names = ("driver_version", "power.limit", "clocks.max.sm")
    values = next(iter(query_gpus(names, units=True)), ())
    return {
        **found,
        "device": torch.cuda.get_device_name(device),
        "gpus": torch.cuda.device_count(),
        **{name.replace(".", "_"): value for name, value in zip(names, values, strict=False)},
    }


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
    """From stored sequences to shards on every group of devices, with the same share of work for each device.

    A lane is timed from its loaded models to its last shard, and the slowest lane counts. `over_gpu_only` is the forward
    fraction, `over_linear` the scaling efficiency.
    """
    runs: list[Json] = []
    assert settings.end_to_end is not None
    share = max(_SHARDS_PER_LANE, round(case["forward"]["sequences_per_second"] * settings.end_to_end))
    for group in device_groups(devices, scaling=settings.scaling):
        with tempfile.TemporaryDirectory(prefix="virnuc-bench-") as scratch:
            folder = RunFolder(Path(scratch))
            plan = _plan_lanes(folder, case["lengths"], planned, config, group, share * len(group))
            measured = [_run_lanes(folder, plan, group) for _ in range(settings.repeats)]
        slowest = [max(seconds for _, seconds in lanes) for lanes in measured]
        counters = sum_counters(shard.counters for report, _ in measured[0] for shard in report.shards)
        [model] = counters.models
        work = Work(
            tokens=model.tokens,
            sequences=counters.frames,
            letters=counters.residues + counters.bases,
            packing_efficiency=model.packing_efficiency,
        )
        speed = work.speed([model.tokens / seconds for seconds in slowest])
        rate = speed["tokens_per_second"] / len(group)
        one_device = runs[0] if runs and len(runs[0]["devices"]) == 1 else None
        loads = [max(report.load_seconds for report, _ in lanes) for lanes in measured]
        runs.append(
            {
                "devices": list(group),
                "speed": speed,
                "load_seconds": statistics.median(loads),
                "over_gpu_only": rate / case["forward"]["tokens_per_second"],
                "over_linear": one_device and rate / one_device["speed"]["tokens_per_second"],
                "work_seconds": slowest,
            }
        )
        what = f"{case['model']} {case['precision']} {case['lengths']} end to end on {len(group)}"
        _log.info("%s: %.0f tokens/s", what, speed["tokens_per_second"])
    return runs


def _plan_lanes(
    folder: RunFolder,
    lengths: str,
    planned: PlannedModel,
    config: RunConfig,
    devices: Sequence[str],
    count: int,
) -> RunPlan:
    """A plan of random sequences with shards of equal cost, `_SHARDS_PER_LANE` for each device."""
    rng = np.random.default_rng(1)
    fasta = folder.root / "sequences.fa"
    drawn = draw_lengths(Lengths.parse(lengths), count, rng)
    write_fasta(fasta, random_sequences(planned.family, drawn, rng))
    store = build_frame_store([fasta], folder.frames, None, "protein" if planned.family == "esm2" else "dna")
    fasta.unlink()
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

        shards, num_lanes = assigned[lane], len(assigned)
        report = run_lane(folder, shards, devices[lane], lane=lane, num_lanes=num_lanes, on_event=on_event)
        return report, last - loaded

    with ThreadPoolExecutor(len(assigned)) as threads:
        measured = list(threads.map(work, range(len(assigned))))
    for shard in plan.shards:
        folder.shard(shard.index).unlink()
    return measured


def text_table(cases: Sequence[Json]) -> str:
    """Forward passes against the floor, then end to end against forward passes, in aligned columns."""
    rows = [_HEADER, *_rows(cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rows(cases: Sequence[Json]) -> Iterator[tuple[str, ...]]:
    for case in cases:
        peak_memory = case["peak_memory_bytes"]
        memory = "" if peak_memory is None else f"{peak_memory / 1e9:.1f}"
        floor = f"floor {case['floor_tokens_per_second']:,.0f}"
        yield _row(case, "forward", case["forward"], floor, case["over_floor"], memory)
        for run in case["end_to_end"]:
            count = len(run["devices"])
            linear = "" if run["over_linear"] is None else f", {run['over_linear']:.3f} of linear"
            measured = f"end to end, {count} device{'s' if count > 1 else ''}"
            yield _row(case, measured, run["speed"], "forward" + linear, run["over_gpu_only"], "")


def _row(case: Json, measured: str, speed: Json, over: str, ratio: float, memory: str) -> tuple[str, ...]:
    rates = (speed[f"{unit}_per_second"] for unit in ("tokens", "letters", "sequences"))
    shown = ("" if rate is None else f"{rate:,.0f}" for rate in rates)
    names = (case["model"], case["precision"], case["lengths"])
    return *names, measured, *shown, over, f"{ratio:.3f}", memory, f"{speed['packing_efficiency']:.3f}"
