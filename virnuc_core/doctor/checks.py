"""Versions, devices, and a small run on every device."""

import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from virnuc_core import __version__
from virnuc_core.columns import Float32
from virnuc_core.doctor.comparison import cosines
from virnuc_core.doctor.preflight import host_fault
from virnuc_core.env_config import available_threads, env
from virnuc_core.errors import VirnucError
from virnuc_core.inference.device import cpu_has_bf16, least_free_memory, resolve_devices, resolve_precision
from virnuc_core.inference.lane_process import LaneProcess
from virnuc_core.inference.lanes import ignore
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.runner import LoadedModels, run_shards
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.catalogue import CATALOGUE, chunks_of
from virnuc_core.models.kernels import MIN_CAPABILITY
from virnuc_core.plain_text import visible
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Engine
from virnuc_core.versions import (
    FLASH_ATTN,
    KNOWN_VERSIONS,
    OLDEST_DRIVER,
    QUACK,
    State,
    installed_version,
    triton_of_torch,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `is_device` is set for GPUs and their software."""

    topic: str
    name: str
    state: State
    found: str
    advice: str = ""
    is_device: bool = False

    @property
    def summary(self) -> str:
        """For the terminal, with the advice on a line of its own."""
        line = f"{self.state:<7}  {self.topic}: {self.name}: {self.found}"
        return visible(f"{line}\n         -> {self.advice}" if self.advice else line)


def all_findings(*, quick: bool) -> Iterator[Finding]:
    """All findings; `quick` leaves out the run on each device."""
    parts = {"versions": version_findings, "devices": device_findings, "home": home_findings}
    parts |= {} if quick else {"self test": self_test_findings}
    for topic, part in parts.items():
        try:
            yield from part()
        except VirnucError as error:
            yield Finding(topic, "all of it", "problem", str(error))


def version_findings() -> Iterator[Finding]:
    """Each package in the table of known versions."""
    yield Finding("versions", "virnuc", "ok", f"{__version__}, Python {platform.python_version()}")
    for known in KNOWN_VERSIONS:
        state, found, advice = known.check()
        is_device = known.package in ("torch", "triton", FLASH_ATTN, QUACK)
        yield Finding("versions", known.package, state, found or "not installed", advice, is_device)


def device_findings() -> Iterator[Finding]:
    """CUDA, Triton, and every device that runs may use, with what "auto" resolves to there."""
    rows = query_gpus(("driver_version",))
    seen = torch.cuda.device_count()
    yield _cuda(rows[0][0] if rows else "", len(rows), seen)
    if seen:
        yield _triton()
    for index in range(seen):
        yield _gpu(f"cuda:{index}")
    bf16 = "with bf16 instructions" if cpu_has_bf16() else "without bf16 instructions"
    found = f"{platform.machine()}, {available_threads()} threads, {bf16}; auto: {_choices('cpu')}"
    yield Finding("devices", "cpu", "ok", found)


def home_findings() -> Iterator[Finding]:
    """Whether the home folder can be written, and its disk has room."""
    fault = host_fault()
    yield Finding("home", "VIRNUC_HOME", "problem" if fault else "ok", fault or str(env().home))


def _cuda(driver: str, num_gpus: int, seen: int) -> Finding:
    built_for = torch.version.cuda
    found = f"torch for CUDA {built_for or 'none (CPU only)'}, driver {driver or 'none'}, {seen} of {num_gpus} GPUs seen"
    advice = ""
    visible_gpus = env().cuda_visible_devices
    if num_gpus and not seen and visible_gpus != ():
        oldest = OLDEST_DRIVER.get(int(built_for.split(".")[0])) if built_for else None
        if not built_for:
            advice = "this torch is CPU-only: install the CUDA build (see pytorch.org)"
        elif oldest and int(driver.split(".")[0]) < oldest:
            advice = f"CUDA {built_for} needs driver {oldest} or later: update the driver, or install an older torch"
        elif visible_gpus is not None:
            advice = f"CUDA_VISIBLE_DEVICES is {','.join(visible_gpus)!r}: unset it to use the GPUs"
        else:
            advice = "torch cannot use the GPUs: check nvidia-smi, or restart the driver"
    return _device_finding("cuda", "problem", found, advice)


def _triton() -> Finding:
    found, wanted = installed_version("triton"), triton_of_torch()
    advice = ""
    if not found or (wanted and found != wanted):
        advice = f"virnuc's kernels need it: pip install triton{f'=={wanted}' if wanted else ''}"
    return _device_finding("triton", "warning", found or "not installed", advice)


def _gpu(device: str) -> Finding:
    properties = torch.cuda.get_device_properties(device)
    _, free = least_free_memory([device])
    found = (
        f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {free / 1e9:.0f} GB free, compute capability "
        f"{properties.major}.{properties.minor}; auto: {_choices(device)}"
    )
    advice = ""
    if (properties.major, properties.minor) < MIN_CAPABILITY:
        advice = "untested below compute capability 8.0: compare with --devices cpu first"
    elif free / 1e9 < 4.0:
        advice = "other programs use its memory: check nvidia-smi, or choose other GPUs with --devices"
    return _device_finding(device, "warning", found, advice)


def _device_finding(name: str, state: State, found: str, advice: str, topic: str = "devices") -> Finding:
    """A finding on a GPU or its software; "ok" without advice."""
    return Finding(topic, name, state if advice else "ok", found, advice, is_device=True)


def _choices(device: str) -> str:
    """What "auto" resolves to on a device, for a large model of each family."""
    precision = resolve_precision("auto", device)
    chosen = dict.fromkeys(
        resolve_attention("auto", device, entry.spec.family, precision, entry.spec.head_dim)
        for entry in CATALOGUE
        if entry.name in ("650M", "DNABERT-S")
    )
    return f"{precision}, {' and '.join(chosen)} attention"


@dataclass(frozen=True, slots=True)
class RunOutput:
    """Vectors of each model, and scores, of the frames of a small run, in row order."""

    vectors: tuple[Float32, ...]
    scores: Float32


def self_test_findings() -> Iterator[Finding]:
    """A small run on every device, in its own process like a lane, against the reference engine on the CPU."""
    with tempfile.TemporaryDirectory(prefix="virnuc-doctor-") as scratch:
        device = "reference"
        try:
            reference = _small_run(Path(scratch), "cpu", "reference")
            for device in dict.fromkeys((*resolve_devices(("auto",)), "cpu")):
                yield compare_outputs(device, _small_run(Path(scratch), device, "packed"), reference)
        except (VirnucError, OSError) as error:
            advice = "otherwise report this output"
            yield Finding(
                "self test", device, "problem", f"it failed: {error}", advice, device != "reference"
            )


def compare_outputs(device: str, found: RunOutput, reference: RunOutput) -> Finding:
    """One device against the reference."""
    worst = [cosines(*pair).min() for pair in zip(found.vectors, reference.vectors, strict=True)]
    difference = float(np.abs(found.scores - reference.scores).max())
    # Vectors in 16 bits stay above 0.99995 (docs/performance.md); a faulty device is far off. NaN compares as false.
    is_good = all(cosine >= 0.9999 for cosine in worst) and difference <= 0.05
    figures = f"{len(found.scores)} frames, lowest cosine {min(worst):.7f}, largest score difference {difference:.5f}"
    advice = "wrong results: do not use this device; try --attention sdpa, --precision fp32 or another torch version"
    return _device_finding(device, "problem", figures, "" if is_good else advice, "self test")


def _small_run(folder: Path, device: str, engine: Engine) -> RunOutput:
    run = RunFolder(folder / f"{engine}-{device.replace(':', '-')}")
    run.root.mkdir()
    config = RunConfig(devices=(device.removeprefix("cuda:"),), engine=engine)
    contigs = Path(__file__).with_name("dnabert_s.fa")
    store = build_frame_store([contigs], run.frames, 500, frames=chunks_of(config)[1])
    plan = open_plan(config, store, "predict", (device,), run)
    shards = range(len(plan.shards))
    if engine == "reference":
        run_shards(run, shards, LoadedModels(device), 0, ignore)
    else:
        with LaneProcess(device) as lane:
            lane.run(run, shards, 0, ignore)
    results: list[Any] = [result for _, result in iter_shard_results(run, plan)]
    dna, protein, scores = (
        np.concatenate([getattr(each, name) for each in results]) for name in ("dna", "protein", "scores")
    )
    return RunOutput((dna, protein), scores)
