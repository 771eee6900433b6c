"""Merges the shards of a run into one embeddings file, in input order."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.checked_hdf5 import CHECKSUM_SUFFIX, SCHEMA_VERSION, ArrayDigest, new_hdf5, write_attributes
from virnuc_core.errors import MismatchError
from virnuc_core.files import atomic_path
from virnuc_core.inference.plan import RunPlan, Shard
from virnuc_core.inference.shard import (
    ShardCounters,
    ShardResult,
    read_shard,
    require_all_shards,
    shard_identity,
    sum_counters,
)
from virnuc_core.prefetcher import Prefetcher
from virnuc_core.results.embeddings import (
    CODES,
    EMBED_VECTORS,
    FRAMES,
    IDS,
    LENGTHS,
    SCORES,
    SIZES,
    STARTS,
    VECTORS,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import FRAME_NAMES
from virnuc_core.specs import CODE_WIDTH, FRAME_KINDS, Family

_POOLING: Final[dict[Family, str]] = {
    "dnabert_s": "mean over all tokens, [CLS] and [SEP] included",
    "esm2": "mean over residues, BOS and EOS excluded",
}

_log = logging.getLogger(__name__)


def aggregate(folder: RunFolder, plan: RunPlan, store: FrameStore, out: Path | None = None) -> ShardCounters:
    """Validates and merges all shards into `out`, by default the run's `embeddings.h5`.

    One is read and verified while another is written, so memory is bounded by the two largest.

    Raises:
        DamagedFileError: a shard is missing, incomplete or corrupt.
        MismatchError: a shard or the store belongs to another run.
    """
    if (store.meta.content_sha256, store.num_frames) != (plan.input_digest, plan.num_rows):
        raise MismatchError(
            f"frame store {store.folder} is not the one that the run in {folder.root} was planned for. "
            "Start over with --force."
        )
    require_all_shards(folder, plan)
    path = folder.embeddings if out is None else out
    counters: list[ShardCounters] = []

    def read(shard: Shard) -> tuple[Shard, ShardResult]:
        return shard, read_shard(folder.shard(shard.index), shard_identity(plan, shard))

    with atomic_path(path) as temporary, new_hdf5(temporary) as file:
        datasets = _create_datasets(file, plan, store)
        with Prefetcher(read, plan.shards, depth=1) as shards, ThreadPoolExecutor(1) as digesting:
            for shard, result in shards:
                for name, values in shard_columns(plan, store, shard, result).items():
                    datasets[name].append(values, digesting)
                counters.append(result.counters)
        checksums = {name + CHECKSUM_SUFFIX: dataset.checksum for name, dataset in datasets.items()}
        write_attributes(file, {**file_attributes(plan), **checksums})
    _log.info("wrote %s: %d rows from %d shards", path, plan.num_rows, len(plan.shards))
    return sum_counters(counters)


def shard_columns(
    plan: RunPlan, store: FrameStore, shard: Shard, result: ShardResult
) -> dict[str, npt.NDArray[Any]]:
    """The rows of the embeddings file that a shard provides, by dataset name."""
    ids = store.frame_ids(shard.begin, shard.end)
    columns: dict[str, npt.NDArray[Any]] = {IDS[plan.kind]: np.array([name.encode() for name in ids])}
    if result.dna is not None:
        columns[_vectors_name(plan, "dnabert_s")] = result.dna
    if result.protein is not None:
        columns[_vectors_name(plan, "esm2")] = result.protein
    if result.scores is not None:
        columns[SCORES] = result.scores
    if result.codes is not None:
        columns[CODES] = result.codes
    if plan.kind == "embed":
        columns[LENGTHS] = store.record_length[shard.begin : shard.end]
    if STARTS in FRAME_KINDS[plan.frames].row_datasets:
        columns[STARTS] = store.frame_start[shard.begin : shard.end]
    if SIZES in FRAME_KINDS[plan.frames].row_datasets:
        columns[SIZES] = store.sizes(np.arange(shard.begin, shard.end))
    return columns


def file_attributes(plan: RunPlan) -> dict[str, str | int]:
    """Metadata of a run's embeddings file: how its values were computed."""
    attributes: dict[str, str | int] = {
        "schema_version": SCHEMA_VERSION,
        "kind": plan.kind,
        "plan_fingerprint": plan.fingerprint,
        "chunk_length": plan.chunk_length or 0,
        "dtype": plan.embeddings,
        "virnuc_version": plan.virnuc_version,
    }
    if plan.kind == "predict":
        attributes[FRAMES] = plan.frames
    if plan.head is not None:
        attributes |= {"head_name": plan.head.name, "head_fingerprint": plan.head.fingerprint}
    for model in plan.models:
        described: dict[str, str | int] = {
            "model_name": model.name,
            "model_family": model.family,
            "weights_fingerprint": model.weights_fingerprint,
            "num_layers": model.spec.num_layers,
            "repr_layer": model.repr_layer,
            "embedding_dim": model.spec.embedding_dim,
            "precision": model.precision,
            "engine": model.engine,
            "token_budget": model.token_budget,
            "pooling": _POOLING[model.family],
        }
        prefix = f"{VECTORS[model.family]}_" if plan.kind == "predict" else ""
        attributes |= {prefix + name: value for name, value in described.items()}
    return attributes


class _GrowingDataset:
    """Written in row order, in HDF5 chunks of about 1 MB with checksums; `width` 0 makes it one-dimensional."""

    def __init__(self, file: h5py.File, name: str, num_rows: int, width: int, dtype: Any) -> None:
        shape = (num_rows, width) if width else (num_rows,)
        row_bytes = max(1, width) * np.dtype(dtype).itemsize
        chunks = (min(num_rows, max(1, (1 << 20) // row_bytes)), *shape[1:])
        compression = "gzip" if np.dtype(dtype).kind == "S" else None
        options = {"chunks": chunks, "fletcher32": True, "compression": compression} if num_rows else {}
        self._dataset = file.create_dataset(name, shape, dtype, **options)
        self._digest = ArrayDigest(dtype, shape)
        self._num_rows = 0

    @property
    def checksum(self) -> str:
        return self._digest.value

    def append(self, values: npt.NDArray[Any], digesting: ThreadPoolExecutor) -> None:
        rows = np.asarray(values, self._dataset.dtype)
        end = self._num_rows + len(rows)
        digested = digesting.submit(self._digest.add, rows)
        self._dataset[self._num_rows : end] = rows
        digested.result()
        self._num_rows = end


def _create_datasets(file: h5py.File, plan: RunPlan, store: FrameStore) -> dict[str, _GrowingDataset]:
    forms: dict[str, tuple[int, Any]] = {IDS[plan.kind]: (0, h5py.string_dtype("utf-8", _id_bytes(store)))}
    if plan.embeddings != "none":
        for model in plan.models:
            forms[_vectors_name(plan, model.family)] = model.spec.embedding_dim, np.dtype(plan.embeddings)
    if plan.head is not None:
        forms[SCORES] = 2, np.dtype(np.float32)
    if plan.kind == "embed":
        forms[LENGTHS] = 0, np.dtype(np.int64)
    kind = FRAME_KINDS[plan.frames]
    further = kind.row_datasets if plan.head is None else (*kind.row_datasets, *kind.head_datasets)
    known = {
        STARTS: (0, np.dtype(np.int64)),
        SIZES: (2, np.dtype(np.int64)),
        CODES: (CODE_WIDTH, np.dtype(np.float16)),
    }
    forms |= {name: known[name] for name in further}
    return {name: _GrowingDataset(file, name, plan.num_rows, *form) for name, form in forms.items()}


def _vectors_name(plan: RunPlan, family: Family) -> str:
    return VECTORS[family] if plan.kind == "predict" else EMBED_VECTORS


def _id_bytes(store: FrameStore) -> int:
    """Length in bytes of the longest id in the store: record name, chunk number, frame."""
    longest_name = int(store.names.lengths.max(initial=1))
    if store.meta.chunk_length is None:
        return longest_name
    chunk_digits = len(str(int(store.chunk_index.max(initial=0)) + 1))
    return longest_name + len("_chunk_") + chunk_digits + len(FRAME_NAMES[0])
