"""Shard files: one HDF5 file a shard, written whole or not at all, and checked to the last byte when read.

A shard is the unit of commit: it holds both models' vectors and the scores of the same rows, so nothing is joined later.
What is done of a run is what is a valid shard file. docs/formats.md describes the layout.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
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
from virnuc_core.files import atomic_path, from_json, parse_object, remove_temporaries
from virnuc_core.inference.plan import RunPlan, Shard, read_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import Family

VECTOR_DATASETS: Final[dict[Family, str]] = {"dnabert_s": "dna", "esm2": "protein"}
_DATASETS: Final = (*VECTOR_DATASETS.values(), "scores")
_MODEL_FIELDS: Final = (
    "name",
    "family",
    "weights_fingerprint",
    "num_layers",
    "repr_layer",
    "embedding_dim",
    "precision",
    "token_budget",
)

_log = logging.getLogger(__name__)


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
        fp32_batches: batches with sequences that were computed again in fp32, because a number was not finite.
        out_of_memory: times that the device ran out of memory and a batch was split.
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

    def __add__(self, other: "ModelCounters") -> "ModelCounters":
        sums = {
            name: getattr(self, name) + value
            for name, value in asdict(other).items()
            if name not in ("name", "family")
        }
        return replace(self, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounters:
    """Work of one shard, or the sum over several: rows, amino acids and bases of all rows, and per model."""

    frames: int
    residues: int
    bases: int
    models: tuple[ModelCounters, ...]


def sum_counters(parts: Iterable[ShardCounters]) -> ShardCounters:
    """Adds up the work of several shards of one plan."""
    parts = list(parts)
    return ShardCounters(
        frames=sum(part.frames for part in parts),
        residues=sum(part.residues for part in parts),
        bases=sum(part.bases for part in parts),
        models=tuple(
            sum(counters[1:], start=counters[0])
            for counters in zip(*(part.models for part in parts), strict=True)
        ),
    )


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


def shard_identity(plan: RunPlan, shard: Shard) -> dict[str, Any]:
    """What the file of a shard must say of itself: its attributes apart from counters and checksums."""
    plan = plan.for_shard(shard.index)
    models = [asdict(model) | asdict(model.spec) for model in plan.models]
    return {
        "plan_fingerprint": plan.fingerprint,
        "index": shard.index,
        "begin": shard.begin,
        "end": shard.end,
        "models": [{name: model[name] for name in _MODEL_FIELDS} for model in models],
        "head_fingerprint": plan.head.fingerprint if plan.head else "",
        "embeddings": plan.embeddings,
        "virnuc_version": plan.virnuc_version,
    }


def write_shard(
    path: Path, result: ShardResult, identity: dict[str, Any], before_commit: Callable[[], None] | None = None
) -> None:
    """Commits a shard: it is on the disk, whole and under its name, when this returns.

    The bytes depend on result and identity only, so a shard computed twice is the same file, also when two processes,
    each of which takes the other for dead, write it at the same time.

    Args:
        path: where the file shall be.
        result: the numbers.
        identity: see `shard_identity`.
        before_commit: called last, before the file gets its name; what it raises leaves no file.
    """
    attributes = {"schema_version": SCHEMA_VERSION} | identity
    attributes["models"] = json.dumps(identity["models"])
    attributes["counters"] = json.dumps(asdict(result.counters))
    with atomic_path(path, shared=True) as temporary:
        with new_hdf5(temporary) as file:
            for name in _DATASETS:
                array = getattr(result, name)
                if array is not None:
                    file.create_dataset(name, data=array)
                    attributes[f"{name}_sha256"] = array_sha256(array)
            write_attributes(file, attributes)
        if before_commit is not None:
            before_commit()


def read_shard(path: Path, identity: dict[str, Any]) -> ShardResult:
    """Reads a shard and checks all of it against the identity that it must have.

    Raises:
        DamagedFileError: it is missing, not whole, or altered.
        MismatchError: it is of another plan, model, range or version.
    """
    try:
        with h5py.File(path, "r") as file:
            attributes = read_attributes(file)
            found = _identity_from(attributes)
            _require_identity(path, found, identity)
            counters = from_json(ShardCounters, parse_object(attributes["counters"]))
            widths = {VECTOR_DATASETS[model["family"]]: model["embedding_dim"] for model in found["models"]}
            arrays: dict[str, npt.NDArray[Any] | None] = dict.fromkeys(_DATASETS)
            for name in arrays:
                checksum = attributes.get(f"{name}_sha256")
                if name not in file and checksum is None:
                    continue
                dataset = stored_dataset(file, name)
                shape = (found["end"] - found["begin"], widths.get(name, dataset.shape[-1]))
                if dataset.shape != shape or dataset.dtype.kind != "f":
                    raise ValueError(f"{name!r} has another shape or type than it must have")
                arrays[name] = array = dataset[()]
                if array_sha256(array) != checksum:
                    raise ValueError(f"the checksum of {name!r} is wrong")
    except HDF5_ERRORS as error:
        raise DamagedFileError(f"shard {path} is not whole ({error}): compute it again.") from error
    return ShardResult(**arrays, counters=counters)


def read_identity(path: Path) -> dict[str, Any]:
    """What a shard says it is, see `shard_identity`.

    Raises:
        DamagedFileError: it is missing, not a shard, or its attributes are altered.
    """
    try:
        with h5py.File(path, "r") as file:
            return _identity_from(read_attributes(file))
    except HDF5_ERRORS as error:
        raise DamagedFileError(f"shard {path} is not whole ({error}): compute it again.") from error


def _identity_from(attributes: dict[str, Any]) -> dict[str, Any]:
    """The identity in the attributes of a file.

    Raises:
        ValueError: they are not those of a shard; or LookupError or TypeError.
    """
    names = ("plan_fingerprint", "index", "begin", "end", "head_fingerprint", "embeddings", "virnuc_version")
    identity = {name: attributes[name] for name in names}
    identity |= parse_object(f'{{"models": {attributes["models"]}}}')
    has_bounds = all(type(identity[name]) is int for name in ("index", "begin", "end"))
    if not has_bounds or not all(tuple(model) == _MODEL_FIELDS for model in identity["models"]):
        raise ValueError("its attributes are not those of a shard")
    return identity


def _require_identity(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    old, new = _flat(found), _flat(expected)
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


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity as single values, those of a model under its family."""
    models = {f"{model['family']}.{name}": model[name] for model in identity["models"] for name in model}
    return {name: value for name, value in identity.items() if name != "models"} | models


def quarantine_file(path: Path) -> Path:
    """Renames a damaged or foreign file to the first free `NAME.damaged-N`, and returns that name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(aside)


def pending_shards(folder: RunFolder, plan: RunPlan) -> tuple[int, ...]:
    """The shards that are still to be computed, in order.

    Every shard on the disk is read and checked. One that is damaged or of another run is renamed, with a
    warning, and counts as missing.
    """
    pending = []
    for shard in plan.shards:
        path = folder.shard(shard.index)
        if path.exists():
            try:
                read_shard(path, shard_identity(plan, shard))
                continue
            except (DamagedFileError, MismatchError) as error:
                aside = quarantine_file(path)
                _log.warning("%s Set aside as %s; it is computed again.", error, aside.name)
        pending.append(shard.index)
    return tuple(pending)


def missing_shards(folder: RunFolder, indices: Iterable[int]) -> tuple[int, ...]:
    """Those of these shards that have no file.

    The folder is listed: asked for one file, a network file system may answer from its cache that it does not exist.
    """
    names = {path.name for path in folder.shards.iterdir()} if folder.shards.is_dir() else set()
    return tuple(index for index in indices if folder.shard(index).name not in names)


def remove_shard_temporaries(folder: RunFolder, indices: Iterable[int]) -> None:
    """Removes what killed lanes have left of shards that nobody computes now."""
    remove_temporaries(folder.shards, {folder.shard(index).name for index in indices})


def require_all_shards(folder: RunFolder, plan: RunPlan) -> None:
    """Refuses to go on unless every shard of the plan has a file; its content is checked when it is read.

    Raises:
        DamagedFileError: a shard is missing.
    """
    if missing := missing_shards(folder, range(len(plan.shards))):
        raise DamagedFileError(
            f"shard {folder.shard(missing[0])} is missing: run the same command again, it computes what is missing."
        )


def iter_shard_results(folder: RunFolder, plan: RunPlan) -> Iterator[tuple[Shard, ShardResult]]:
    """Yields all shards in row order, each checked when it is read.

    Raises:
        DamagedFileError: a shard is missing, incomplete or altered.
        MismatchError: a shard is of another run.
    """
    require_all_shards(folder, plan)
    for shard in plan.shards:
        yield shard, read_shard(folder.shard(shard.index), shard_identity(plan, shard))


class CommitGuard:
    """Keeps the shards of a lane out of a folder whose run was started over since the lane began.

    Args:
        folder: the run's folder.
        plan: the plan that the lane works on.
    """

    def __init__(self, folder: RunFolder, plan: RunPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._known_digest = ""  # of the last plan.json that was found to be the lane's

    def require_planned(self, shard: Shard) -> None:
        """Refuses a shard that the plan in the folder does not ask for.

        Raises:
            MismatchError: the folder has the plan of another run.
            DamagedFileError: its plan cannot be read.
            OSError: it has none.
        """
        digest = hashlib.sha256(self._folder.plan.read_bytes()).hexdigest()
        if digest == self._known_digest:
            return
        current = read_plan(self._folder.plan)
        wanted = current.shards[shard.index : shard.index + 1]
        if [shard_identity(current, one) for one in wanted] != [shard_identity(self._plan, shard)]:
            raise MismatchError(
                f"{self._folder.root} was started over (--force) while this lane was at work for the run before it: its "
                f"shard {shard.index} is not written."
            )
        if current.fingerprint == self._plan.fingerprint:
            self._known_digest = digest
