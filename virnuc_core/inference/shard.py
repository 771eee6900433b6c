"""Shard files, the units of commit: written atomically, fully verified on reading; see docs/formats.md."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core import __version__
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
from virnuc_core.files import atomic_path, from_json, parse_object, remove_temporaries, sync_file
from virnuc_core.inference.plan import RunPlan, Shard, read_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import Family

VECTOR_DATASETS: Final[dict[Family, str]] = {"dnabert_s": "dna", "esm2": "protein"}
_DATASETS: Final = (*VECTOR_DATASETS.values(), "scores", "codes")
# Of the attributes, what tells shards of one run from all others: the fingerprint is over everything that decides the results.
_IDENTIFYING: Final = ("plan_fingerprint", "index", "begin", "end")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCounters:
    """Work of one model.

    Attributes:
        sequences: distinct ones; duplicates are embedded once.
        capacity: tokens that the batches have room for, including padding.
        fp32_batches: batches with sequences recomputed in fp32 because of non-finite values.
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
        """Real tokens over capacity, in (0, 1]; 1.0 for no work."""
        return self.tokens / self.capacity if self.capacity else 1.0

    def __add__(self, other: "ModelCounters") -> "ModelCounters":
        amounts = ("sequences", "tokens", "batches", "capacity", "fp32_batches", "out_of_memory")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in amounts})


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounters:
    """Work of one or more shards; residues and bases count duplicates."""

    frames: int
    residues: int
    bases: int
    models: tuple[ModelCounters, ...]


def sum_counters(parts: Iterable[ShardCounters]) -> ShardCounters:
    """Sums the work of shards of one plan."""
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
    """Results of one shard, in row order; None for what the run does not have.

    Attributes:
        dna: (n, D_dna), in the dtype to be stored.
        protein: (n, D_protein), in the dtype to be stored.
        scores: fp32 (n, 2), P(other) and P(virus).
        codes: fp16 (n, CODE_WIDTH), of a head for the longest ORFs.
    """

    dna: npt.NDArray[np.floating[Any]] | None
    protein: npt.NDArray[np.floating[Any]] | None
    scores: npt.NDArray[np.float32] | None
    counters: ShardCounters
    codes: npt.NDArray[np.float16] | None = None


def shard_identity(plan: RunPlan, shard: Shard) -> dict[str, Any]:
    """Required attributes of a shard file, except counters and checksums."""
    models = [
        {
            "name": model.name,
            "family": model.family,
            "weights_fingerprint": model.weights_fingerprint,
            "num_layers": model.spec.num_layers,
            "repr_layer": model.repr_layer,
            "embedding_dim": model.spec.embedding_dim,
            "precision": model.precision,
            "token_budget": model.token_budget,
        }
        for model in plan.models
    ]
    return {
        "plan_fingerprint": plan.fingerprint,
        "index": shard.index,
        "begin": shard.begin,
        "end": shard.end,
        "models": models,
        "head_fingerprint": plan.head.fingerprint if plan.head else "",
        "embeddings": plan.embeddings,
    }


def write_shard(
    path: Path, result: ShardResult, identity: dict[str, Any], before_commit: Callable[[], None] | None = None
) -> None:
    """Commits a shard, which is complete and on disk on return.

    The bytes depend on `result`, `identity` and the version of virnuc only, so recomputed shards are byte-identical, even
    when two processes write one concurrently. `before_commit` runs just before the rename; if it raises, no file is left.
    """
    attributes: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "virnuc_version": __version__, **identity}
    attributes["models"] = json.dumps(identity["models"])
    attributes["counters"] = json.dumps(asdict(result.counters))
    present = {name: array for name in _DATASETS if (array := getattr(result, name)) is not None}
    with atomic_path(path, shared=True) as temporary:
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as checksums, new_hdf5(temporary) as file:
            digests = {name: checksums.submit(array_sha256, array) for name, array in present.items()}
            for name, array in present.items():
                file.create_dataset(name, data=array)
            file.flush()
            sync_file(temporary)  # nearly all of it, while checksums are made
            attributes |= {f"{name}_sha256": digest.result() for name, digest in digests.items()}
            write_attributes(file, attributes)
        if before_commit is not None:
            before_commit()


def read_shard(path: Path, identity: dict[str, Any], *, is_verified: bool = False) -> ShardResult:
    """Reads a shard of the expected identity, with the checksums of its arrays unless this run has verified them before.

    Raises:
        DamagedFileError: it is missing, incomplete or altered.
        MismatchError: it is of another plan, model, range or version.
    """
    with _opened(path) as (file, attributes):
        for name in _IDENTIFYING:
            if attributes[name] != identity[name]:
                raise MismatchError(
                    f"shard {path} belongs to another run: {name} is {attributes[name]} in the file and {identity[name]} in "
                    "the plan. Use the old settings, or start over with --force."
                )
        counters = from_json(ShardCounters, parse_object(attributes["counters"]))
        arrays: dict[str, npt.NDArray[Any] | None] = dict.fromkeys(_DATASETS)
        for name in arrays:
            checksum = attributes.get(f"{name}_sha256")
            if name not in file and checksum is None:
                continue
            arrays[name] = array = stored_dataset(file, name)[()]
            if len(array) != identity["end"] - identity["begin"]:
                raise ValueError(f"{name!r} and the shard differ in their number of rows")
            if not is_verified and array_sha256(array) != checksum:
                raise ValueError(f"the checksum of {name!r} does not match")
    return ShardResult(**arrays, counters=counters)


def read_identity(path: Path) -> dict[str, Any]:
    """The attributes stored in a shard: those of `shard_identity`, and `virnuc_version`, which computed it.

    Raises:
        DamagedFileError: it is missing, not a shard, or its attributes are altered.
    """
    with _opened(path) as (_, attributes):
        models = parse_object(f'{{"models": {attributes["models"]}}}')
        names = (*_IDENTIFYING, "head_fingerprint", "embeddings", "virnuc_version")
        if not all(type(attributes[name]) is int for name in ("index", "begin", "end")):
            raise ValueError("its attributes are not those of a shard")
        return {**{name: attributes[name] for name in names}, **models}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[h5py.File, dict[str, Any]]]:
    """A shard and its attributes; what the block finds wrong with it is damage."""
    try:
        with h5py.File(path, "r") as file:
            yield file, read_attributes(file)
    except HDF5_ERRORS as error:
        raise DamagedFileError(f"shard {path} is corrupt ({error}): recompute it.") from error


def quarantine_file(path: Path) -> Path:
    """Renames a corrupt or foreign file to the first free `NAME.damaged-N`, and returns that path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(aside)


def pending_shards(folder: RunFolder, plan: RunPlan) -> tuple[int, ...]:
    """Shards still to be computed, in order; corrupt or foreign files on disk are renamed with a warning."""
    pending = []
    for shard in plan.shards:
        path = folder.shard(shard.index)
        if path.exists():
            try:
                read_shard(path, shard_identity(plan, shard))
                continue
            except (DamagedFileError, MismatchError) as error:
                aside = quarantine_file(path)
                _log.warning("%s Moved to %s; recomputing it.", error, aside.name)
        pending.append(shard.index)
    return tuple(pending)


def missing_shards(folder: RunFolder, indices: Iterable[int]) -> tuple[int, ...]:
    """The shards without a file, by listing the folder: network file systems may cache a negative lookup."""
    names = {path.name for path in folder.shards.iterdir()} if folder.shards.is_dir() else set()
    return tuple(index for index in indices if folder.shard(index).name not in names)


def is_committed(folder: RunFolder, index: int) -> bool:
    """Whether a shard has a file; lists the folder, which may be long, only if a lookup finds none."""
    return folder.shard(index).exists() or not missing_shards(folder, (index,))


def remove_shard_temporaries(folder: RunFolder, indices: Iterable[int]) -> None:
    """Removes leftovers of killed lanes for shards that nobody is computing."""
    remove_temporaries(folder.shards, {folder.shard(index).name for index in indices})


def iter_shard_results(folder: RunFolder, plan: RunPlan) -> Iterator[tuple[Shard, ShardResult]]:
    """Yields all shards in row order, which `pending_shards` has verified; raises as `read_shard`."""
    for shard in plan.shards:
        yield shard, read_shard(folder.shard(shard.index), shard_identity(plan, shard), is_verified=True)


def require_planned(folder: RunFolder, plan: RunPlan, shard: Shard) -> None:
    """Rejects a shard of a lane whose run was started over."""
    if read_plan(folder.plan).fingerprint != plan.fingerprint:
        raise MismatchError(
            f"{folder.root} was started over (--force) while this lane worked on the previous run: its shard "
            f"{shard.index} is not written."
        )
