"""Facts for choosing a model: size, memory, speed, licence, and whether it is installed."""

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, get_args

from virnuc_core.inference.device import needed_bytes, saturating_token_budget
from virnuc_core.models.catalogue import BUNDLED_HEADS, CATALOGUE, CatalogueEntry, HubCommit
from virnuc_core.models.checkpoint import parameter_shapes
from virnuc_core.models.hub import location_of
from virnuc_core.specs import Family, ModelSpec, ResolvedPrecision

# Results in benchmarks/results, collected by scripts/render/speeds.py.
_SPEEDS: Final = Path(__file__).parent / "speeds.json"
_PUBLISHED_BYTES: Final = 4  # per parameter: published checkpoints are fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed:
    """One result of a committed benchmark, with its result file and command.

    Attributes:
        letters_per_second: residues for ESM-2, bases for DNABERT-S.
        letters: length of each sequence.
    """

    family: Family
    name: str
    precision: ResolvedPrecision
    machine: str
    letters_per_second: float
    letters: int
    result: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """One model of the catalogue; `location` is None if it is not installed.

    `disk_bytes` is the size of its files, or of fp32 parameters if not installed.
    """

    entry: CatalogueEntry
    spec: ModelSpec
    location: Path | None
    disk_bytes: int
    speeds: tuple[MeasuredSpeed, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the encoder, without heads for other tasks."""
        return sum(math.prod(shape) for shape in parameter_shapes(self.spec).values())

    @property
    def gpu_bytes(self) -> dict[ResolvedPrecision, int]:
        """GPU memory by precision: weights and a batch of the default size."""
        budget = saturating_token_budget(self.spec, "cuda")
        return {name: needed_bytes(self.spec, name, budget) for name in get_args(ResolvedPrecision)}

    @property
    def cpu_bytes(self) -> int:
        """The same on the CPU, in fp32."""
        return needed_bytes(self.spec, "fp32", saturating_token_budget(self.spec, "cpu"))

    @property
    def here(self) -> str:
        """Where it is installed, in words."""
        if self.location is None:
            return "no"
        return "hub cache" if isinstance(self.entry.source, HubCommit) else "bundled"

    @property
    def document(self) -> dict[str, Any]:
        """The facts as plain JSON values."""
        hub = self.entry.source if isinstance(self.entry.source, HubCommit) else None
        return {
            "name": self.entry.name,
            "family": self.entry.family,
            "layers": self.spec.num_layers,
            "width": self.spec.embedding_dim,
            "heads": self.spec.num_heads,
            "parameters": self.num_parameters,
            "disk_bytes": self.disk_bytes,
            "disk_bytes_are": "estimated" if self.location is None else "measured",
            "gpu_token_budget": saturating_token_budget(self.spec, "cuda"),
            "gpu_bytes": self.gpu_bytes,
            "cpu_token_budget": saturating_token_budget(self.spec, "cpu"),
            "cpu_fp32_bytes": self.cpu_bytes,
            "speeds": [asdict(speed) for speed in self.speeds],
            "repository": hub and hub.repo,
            "revision": hub and hub.revision,
            "licence": self.entry.licence or None,
            "here": self.here,
            "location": self.location and str(self.location),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFacts:
    """A bundled head."""

    name: str
    location: Path
    disk_bytes: int


def model_facts() -> list[ModelFacts]:
    """All models of the catalogue; downloads nothing."""
    return [_facts(entry) for entry in CATALOGUE]


def head_facts() -> list[HeadFacts]:
    """The bundled heads."""
    return [
        HeadFacts(name=name, location=path, disk_bytes=path.stat().st_size)
        for name, path in BUNDLED_HEADS.items()
    ]


@lru_cache(maxsize=1)
def measured_speeds() -> tuple[MeasuredSpeed, ...]:
    """All benchmark results shipped with the package."""
    return tuple(MeasuredSpeed(**row) for row in json.loads(_SPEEDS.read_text()))


def _facts(entry: CatalogueEntry) -> ModelFacts:
    location = location_of(entry)
    spec = entry.spec
    if location is None:
        disk_bytes = _PUBLISHED_BYTES * sum(math.prod(shape) for shape in parameter_shapes(spec).values())
    else:
        disk_bytes = sum(path.stat().st_size for path in location.iterdir() if path.is_file())
    return ModelFacts(
        entry=entry,
        spec=spec,
        location=location,
        disk_bytes=disk_bytes,
        speeds=tuple(s for s in measured_speeds() if (s.family, s.name) == (entry.family, entry.name)),
    )
