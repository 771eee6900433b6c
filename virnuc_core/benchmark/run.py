"""One benchmark from its settings to its result: every model in every precision, one after another."""

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from virnuc_core.benchmark.end_to_end import device_groups, measure_end_to_end, over_linear
from virnuc_core.benchmark.forward import measure_forward
from virnuc_core.benchmark.results import BenchResult, Case, machine
from virnuc_core.benchmark.settings import BenchSettings
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.model_planning import plan_models
from virnuc_core.models.checkpoints import family_of
from virnuc_core.models.compilation import resolve_compile_mode
from virnuc_core.run_plan import PlannedModel
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Precision


def run_benchmark(settings: BenchSettings, command: str) -> BenchResult:
    """Measures everything that is asked for; the result is written after every model.

    Args:
        settings: what to measure.
        command: the command line, to be recorded in the result.

    Raises:
        VirnucError: a model, device or setting cannot be used.
    """
    devices = resolve_devices(settings.devices)
    if devices[0] != "cpu":
        torch.cuda.set_device(devices[0])
    result = BenchResult(command=command, machine=machine(devices[0]), cases=())
    for model in settings.models:
        for precision in settings.precisions:
            planned, config = _plan(model, precision, settings, devices)
            measured = measure_forward(model, planned, settings, devices[0])
            _forget(planned)
            cases = [_with_end_to_end(case, planned, config, devices, settings) for case in measured]
            result = replace(result, cases=(*result.cases, *cases))
            if settings.out is not None:
                result.write(Path(settings.out))
    return result


def _plan(
    model: str, precision: Precision, settings: BenchSettings, devices: tuple[str, ...]
) -> tuple[PlannedModel, RunConfig]:
    """How a run with these settings would compute the model, and those settings with nothing left open."""
    family, name = family_of(model)
    config = RunConfig(
        chunk_length=None,
        esm_model=name if family == "esm2" else None,
        dnabert_model=name if family == "dnabert_s" else None,
        precision=precision,
        devices=settings.devices,
        token_budget=settings.token_budget,
        attention=settings.attention,
    )
    [planned] = plan_models(config, devices, None)
    mode = resolve_compile_mode(settings.compile_mode, planned.attention, math.inf)
    planned = replace(planned, compile_mode=mode)
    return planned, config.model_copy(update={"token_budget": planned.token_budget, "compile_mode": mode})


def _with_end_to_end(
    case: Case, planned: PlannedModel, config: RunConfig, devices: Sequence[str], settings: BenchSettings
) -> Case:
    """The same case with what the whole way gives on every group of devices, if that is asked for."""
    if settings.end_to_end is None:
        return case
    runs = [
        measure_end_to_end(
            case, planned, config, group, seconds=settings.end_to_end, repeats=settings.repeats
        )
        for group in device_groups(devices, scaling=settings.scaling)
    ]
    one_device = runs[0] if len(runs[0].devices) == 1 else None
    return replace(case, end_to_end=tuple(over_linear(run, one_device) for run in runs))


def _forget(planned: PlannedModel) -> None:
    """Drops what is kept of a model that nobody uses any more: its compiled layers and the device's memory.

    Compiled layers are kept for a limited number of models, and then nothing is compiled any more.
    """
    if planned.compile_mode != "none":
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
