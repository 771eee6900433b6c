"""What a benchmark found, as it is written to JSON."""

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from virnuc_core import __version__
from virnuc_core.files import write_text
from virnuc_core.inference.nvidia_smi import query_gpus

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A rate that was measured several times.

    Attributes:
        tokens_per_second: the median, special tokens counted, padding not.
        repeats: tokens/s of every measurement, in order.
        sequences_per_second: at the median.
        letters_per_second: residues or bases at the median; None where only tokens were made.
        packing_efficiency: real tokens over the room in the batches, in (0, 1].
    """

    tokens_per_second: float
    repeats: tuple[float, ...]
    sequences_per_second: float
    letters_per_second: float | None
    packing_efficiency: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EndToEnd:
    """Stored sequences in, shards on the disk out, on some devices at once.

    Attributes:
        devices: one lane each.
        speed: over all devices; the clock of each lane starts when its models are loaded and stops at its
            last shard, and the slowest lane counts.
        load_seconds: from the start of the slowest process to its loaded and warmed-up models.
        over_gpu_only: tokens/s of one device over the speed of forward passes alone.
        over_linear: tokens/s over that of one device times the number of devices; None on one
            device, and where one device was not measured.
        work_seconds: of the slowest lane, in each measurement.
    """

    devices: tuple[str, ...]
    speed: Speed
    load_seconds: float
    over_gpu_only: float
    over_linear: float | None
    work_seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model in one precision at one distribution of lengths.

    Attributes:
        model: as asked for.
        family: architecture.
        precision: arithmetic.
        attention: backend.
        compile_mode: of the layers.
        lengths: distribution of lengths, as asked for.
        token_budget: most tokens in one batch.
        load_seconds: making or reading the weights and moving them.
        warmup_seconds: the first pass over all batches of this model, compilation included.
        peak_memory_bytes: most memory that the model and its batches took; None on the CPU.
        forward: batches ready on the device, to mean vectors there.
        floor: the matrix products of the same model over the token budget; `tokens_per_second` and
            `repeats` as in `forward`.
        over_floor: tokens/s of `forward` over those of `floor`.
        end_to_end: for each number of devices.
    """

    model: str
    family: str
    precision: str
    attention: str
    compile_mode: str
    lengths: str
    token_budget: int
    load_seconds: float
    warmup_seconds: float
    peak_memory_bytes: int | None
    forward: Speed
    floor_tokens_per_second: float
    floor_repeats: tuple[float, ...]
    over_floor: float
    end_to_end: tuple[EndToEnd, ...] = ()


def speed_of(
    repeats: Sequence[float], tokens: int, sequences: int, letters: int | None, efficiency: float
) -> Speed:
    """A speed from its measurements and from what the same tokens were.

    Args:
        repeats: tokens/s.
        tokens: of some work at this speed.
        sequences: the same work in sequences.
        letters: the same work in letters, where it had any.
        efficiency: packing efficiency.
    """
    median = statistics.median(repeats)
    return Speed(
        tokens_per_second=median,
        repeats=tuple(repeats),
        sequences_per_second=median * sequences / tokens,
        letters_per_second=None if letters is None else median * letters / tokens,
        packing_efficiency=efficiency,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """Everything that one command measured, and on what; this is the JSON of a benchmark.

    Attributes:
        command: the command line that gives it again.
        machine: hardware and versions.
        cases: what was measured.
        date: of the measurement, UTC.
        kind: tells this JSON from others.
        schema_version: of this JSON.
    """

    command: str
    machine: dict[str, Any]
    cases: tuple[Case, ...]
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    kind: str = "bench"
    schema_version: int = SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")


def machine(device: str) -> dict[str, Any]:
    """Hardware and versions that a figure depends on."""
    found: dict[str, Any] = {
        "virnuc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
    }
    if device == "cpu":
        return {**found, "device": f"{platform.machine()} CPU", "threads": torch.get_num_threads()}
    return {
        **found,
        "device": torch.cuda.get_device_name(device),
        "gpus": torch.cuda.device_count(),
        **_driver(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> dict[str, str]:
    """Driver and power limit of the first GPU, as far as nvidia-smi tells."""
    names = ("driver_version", "power.limit", "clocks.max.sm")
    values = next(iter(query_gpus(names, units=True)), ())
    return {name.replace(".", "_"): value for name, value in zip(names, values, strict=False)}
