"""One HDF5 file per shard: written whole or not at all, and checked to the last byte when read.

A shard is the unit of commit: it holds both models' vectors and the scores of the same rows, so nothing is
joined later. docs/formats.md describes the layout.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.checked_hdf5 import (
    HDF5_ERRORS,
    SCHEMA_VERSION,
    array_sha256,
    new_hdf5,
    read_attributes,
    stored_dataset,
    write_attributes,
)
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.files import atomic_path, from_json, parse_object
from virnuc_core.specs import Family

_DATASETS: Final = ("dna", "protein", "scores")
_VECTORS: Final[dict[Family, str]] = {"dnabert_s": "dna", "esm2": "protein"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """What a shard records of one model, besides its vectors."""

    name: str
    family: Family
    weights_fingerprint: str
    num_layers: int
    repr_layer: int
    embedding_dim: int
    precision: str
    token_budget: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIdentity:
    """What a shard must agree in with the plan before it is kept or merged.

    Attributes:
        plan_fingerprint: of the plan that the shard was made for.
        index: place in that plan.
        begin: first row.
        end: one past the last row.
        models: the models that made the vectors.
        head_fingerprint: the classifier that made the scores; "" without scores.
        embeddings: dtype of the stored vectors, or "none".
        virnuc_version: version that computed it.
    """

    plan_fingerprint: str
    index: int
    begin: int
    end: int
    models: tuple[ModelIdentity, ...]
    head_fingerprint: str
    embeddings: str
    virnuc_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCounters:
    """Work of one model.

    Attributes:
        name: as in the plan.
        family: architecture.
        sequences: distinct sequences; equal ones are embedded once.
        tokens: their tokens.
        batches: batches as planned.
        capacity: tokens that those batches had room for, padding counted as room.
        fp32_batches: batches with sequences that were done again in fp32, because a number was not finite.
        out_of_memory: times that the device ran out of memory and a batch was parted.
    """

    name: str
    family: Family
    sequences: int
    tokens: int
    batches: int
    capacity: int
    fp32_batches: int = 0
    out_of_memory: int = 0

    @property
    def packing_efficiency(self) -> float:
        """Real tokens over room, in (0, 1]; 1.0 for no work."""
        return self.tokens / self.capacity if self.capacity else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounters:
    """Work of one shard, or the sum over several: rows, amino acids and bases of all rows, and per model."""

    frames: int
    residues: int
    bases: int
    models: tuple[ModelCounters, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardResult:
    """The numbers of one shard, rows in row order.

    Attributes:
        dna: (n, D_dna) vectors of the DNA model, in the dtype to be stored; None without one.
        protein: (n, D_protein) the same of the protein model.
        scores: fp32 (n, 2), P(other) and P(virus); None without a head.
        counters: the work done.
    """

    dna: npt.NDArray[np.floating[Any]] | None
    protein: npt.NDArray[np.floating[Any]] | None
    scores: npt.NDArray[np.float32] | None
    counters: ShardCounters


def sum_counters(parts: Iterable[ShardCounters]) -> ShardCounters:
    """Adds up the work of several shards of one plan."""
    total = ShardCounters(frames=0, residues=0, bases=0, models=())
    for part in parts:
        models = part.models
        if total.models:
            models = tuple(map(_add_model, total.models, part.models))
        total = ShardCounters(
            frames=total.frames + part.frames,
            residues=total.residues + part.residues,
            bases=total.bases + part.bases,
            models=models,
        )
    return total


def write_shard(
    path: Path, result: ShardResult, identity: ShardIdentity, require_wanted: Callable[[], None] | None = None
) -> None:
    """Commits a shard: it is on the disk, whole and under its name, when this returns.

    The bytes depend on the arguments only, so a shard computed twice is the same file, also when two processes,
    each of which takes the other for dead, write it at the same time.

    Args:
        path: where the file shall be.
        result: the numbers.
        identity: what it is.
        require_wanted: is called last, before the file gets its name; what it raises leaves no file.
    """
    attributes: dict[str, str | int] = {"schema_version": SCHEMA_VERSION}
    attributes |= {f.name: getattr(identity, f.name) for f in fields(identity) if f.name != "models"}
    attributes["models"] = json.dumps([asdict(model) for model in identity.models])
    attributes["counters"] = json.dumps(asdict(result.counters))
    with atomic_path(path, shared=True) as temporary:
        with new_hdf5(temporary) as file:
            for name in _DATASETS:
                array = getattr(result, name)
                if array is not None:
                    file.create_dataset(name, data=array)
                    attributes[f"{name}_sha256"] = array_sha256(array)
            write_attributes(file, attributes)
        if require_wanted is not None:
            require_wanted()


def read_shard(path: Path, identity: ShardIdentity) -> ShardResult:
    """Reads a shard and checks all of it.

    Args:
        path: the file.
        identity: what it must be.

    Raises:
        DamagedFileError: it is missing, not whole, or altered.
        MismatchError: it is whole, but of another plan, model, range or version.
    """
    try:
        with h5py.File(path, "r") as file:
            attributes = read_attributes(file)
            found = _identity_of(attributes)
            counters = from_json(ShardCounters, parse_object(attributes["counters"]))
            datasets = {name: stored_dataset(file, name) for name in _DATASETS if name in file}
            widths = {_VECTORS[model.family]: model.embedding_dim for model in found.models} | {"scores": 2}
            for name, dataset in datasets.items():
                width = widths.get(name, dataset.shape[-1])
                if dataset.shape != (found.end - found.begin, width) or dataset.dtype.kind != "f":
                    raise ValueError(f"{name!r} has another form than it must have")
            arrays = {name: dataset[()] for name, dataset in datasets.items()}
            altered = [n for n in _DATASETS if (n in arrays) != (f"{n}_sha256" in attributes)]
            altered += [n for n, a in arrays.items() if attributes.get(f"{n}_sha256") != array_sha256(a)]
    except HDF5_ERRORS as error:
        raise DamagedFileError(f"shard {path} is not whole ({error}): compute it again.") from error
    if altered:
        raise DamagedFileError(f"shard {path}: the checksum of {altered[0]!r} is wrong: compute it again.")
    _require_identity(path, found, identity)
    return ShardResult(
        dna=arrays.get("dna"), protein=arrays.get("protein"), scores=arrays.get("scores"), counters=counters
    )


def read_identity(path: Path) -> ShardIdentity:
    """What a shard says it is.

    Raises:
        DamagedFileError: it is missing, not a shard, or its attributes are altered.
    """
    try:
        with h5py.File(path, "r") as file:
            return _identity_of(read_attributes(file))
    except HDF5_ERRORS as error:
        raise DamagedFileError(f"shard {path} is not whole ({error}): compute it again.") from error


def set_aside(path: Path) -> Path:
    """Renames a damaged or foreign file to the first free `NAME.damaged-N`, and returns that name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(aside)


def _identity_of(attributes: dict[str, Any]) -> ShardIdentity:
    values = {f.name: attributes[f.name] for f in fields(ShardIdentity)}
    models = parse_object(f'{{"models": {values["models"]}}}')
    return from_json(ShardIdentity, values | models)


def _add_model(left: ModelCounters, right: ModelCounters) -> ModelCounters:
    return ModelCounters(
        name=left.name,
        family=left.family,
        sequences=left.sequences + right.sequences,
        tokens=left.tokens + right.tokens,
        batches=left.batches + right.batches,
        capacity=left.capacity + right.capacity,
        fp32_batches=left.fp32_batches + right.fp32_batches,
        out_of_memory=left.out_of_memory + right.out_of_memory,
    )


def _require_identity(path: Path, found: ShardIdentity, wanted: ShardIdentity) -> None:
    old, new = _flat(found), _flat(wanted)
    differing = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if not differing:
        return
    # The plan's fingerprint differs whenever anything does: it is named when nothing else can be.
    named = [name for name in differing if name != "plan_fingerprint"] or differing
    described = "; ".join(f"{n} is {old.get(n)} in the file and {new.get(n)} in the plan" for n in named)
    raise MismatchError(
        f"shard {path} is of another run: {described}. Go on with the old setting, start over with --force, or "
        "move the run to another setting with `virnuc reprocess`."
    )


def _flat(identity: ShardIdentity) -> dict[str, Any]:
    """An identity as single values, those of a model under its family."""
    values = asdict(identity)
    models = values.pop("models")
    return values | {f"{model['family']}.{name}": value for model in models for name, value in model.items()}
