"""Merges the shards of a run into one embeddings file, in input order."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.checked_hdf5 import CHECKSUM_SUFFIX, SCHEMA_VERSION, ArrayDigest, new_hdf5, write_attributes
from virnuc_core.errors import MismatchError
from virnuc_core.files import atomic_path, sync_file
from virnuc_core.inference.plan import RunPlan, Shard
from virnuc_core.inference.shard import (
    VECTOR_DATASETS,
    ShardCounters,
    ShardResult,
    is_committed,
    read_shard,
    shard_identity,
    sum_counters,
)
from virnuc_core.prefetcher import Prefetcher
from virnuc_core.results.embeddings import CODES, EMBED_VECTORS, FRAMES, IDS, LENGTHS, SCORES, SIZES, STARTS
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import FRAME_NAMES
from virnuc_core.specs import CODE_WIDTH, FRAME_KINDS, Family

_Rows = Callable[[Shard, ShardResult], Any]
_Column = tuple[int, Any, _Rows]  # width, 0 for one dimension; dtype; and what a shard provides

_POLL_SECONDS: Final = 1.0

_log = logging.getLogger(__name__)


def aggregate(
    folder: RunFolder,
    plan: RunPlan,
    store: FrameStore,
    out: Path | None = None,
    all_committed: threading.Event | None = None,
) -> ShardCounters:
    """Verifies all shards and merges them into `out`, by default the run's `embeddings.h5`.

    Waits for those that are not there until `all_committed` is set. One is read while another is written, so memory is
    bounded by the two largest.

    Raises:
        DamagedFileError: a shard is missing or damaged.
        MismatchError: a shard or the store belongs to another run.
    """
    if (store.meta.content_sha256, store.num_frames) != (plan.input_digest, plan.num_rows):
        raise MismatchError(
            f"frame store {store.folder} does not belong to the run in {folder.root}. Start over with --force."
        )
    path = folder.embeddings if out is None else out
    columns = _columns(plan, store)
    counters: list[ShardCounters] = []

    def read(shard: Shard) -> tuple[Shard, ShardResult]:
        if all_committed is not None:
            wait_for_shard(folder, shard.index, all_committed)
        return shard, read_shard(folder.shard(shard.index), shard_identity(plan, shard))

    with atomic_path(path) as temporary, new_hdf5(temporary) as file:
        datasets = {
            name: _create_dataset(file, name, plan.num_rows, width, dtype)
            for name, (width, dtype, _) in sorted(columns.items(), key=lambda column: column[0] == CODES)
        }
        digests = {name: ArrayDigest(dataset.dtype, dataset.shape) for name, dataset in datasets.items()}
        with Prefetcher(read, plan.shards, depth=1) as shards, ThreadPoolExecutor(1) as digesting:
            for shard, result in shards:
                for name, (_, _, rows_of) in columns.items():
                    rows = np.asarray(rows_of(shard, result), datasets[name].dtype)
                    digested = digesting.submit(digests[name].add, rows)
                    datasets[name][shard.begin : shard.end] = rows
                    digested.result()
                counters.append(result.counters)
                sync_file(temporary)  # so that the last sync is short
        checksums = {name + CHECKSUM_SUFFIX: digest.value for name, digest in digests.items()}
        write_attributes(file, {**_attributes(plan), **checksums})
    _log.info("wrote %s: %d rows from %d shards", path, plan.num_rows, len(plan.shards))
    return sum_counters(counters)


def wait_for_shard(folder: RunFolder, index: int, all_committed: threading.Event) -> None:
    """Returns when a shard is committed, or none will be any more."""
    while not is_committed(folder, index) and not all_committed.wait(_POLL_SECONDS):
        pass


def _attributes(plan: RunPlan) -> dict[str, str | int]:
    """How the values of the file were computed."""
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
    pooling: dict[Family, str] = {
        "dnabert_s": "mean over all tokens, [CLS] and [SEP] included",
        "esm2": "mean over residues, BOS and EOS excluded",
    }
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
            "pooling": pooling[model.family],
        }
        prefix = f"{VECTOR_DATASETS[model.family]}_" if plan.kind == "predict" else ""
        attributes |= {prefix + name: value for name, value in described.items()}
    return attributes


def _columns(plan: RunPlan, store: FrameStore) -> dict[str, _Column]:
    kind = FRAME_KINDS[plan.frames]
    vectors: dict[Family, _Rows] = {
        "dnabert_s": lambda _, result: result.dna,
        "esm2": lambda _, result: result.protein,
    }
    known: dict[str, _Column] = {
        SCORES: (2, np.float32, lambda _, result: result.scores),
        CODES: (CODE_WIDTH, np.float16, lambda _, result: result.codes),
        LENGTHS: (0, np.int64, lambda shard, _: store.record_length[shard.begin : shard.end]),
        STARTS: (0, np.int64, lambda shard, _: store.frame_start[shard.begin : shard.end]),
        SIZES: (2, np.int64, lambda shard, _: store.sizes(np.arange(shard.begin, shard.end))),
    }
    names = {*kind.row_datasets}
    if plan.kind == "embed":
        names.add(LENGTHS)
    if plan.head is not None:
        names |= {SCORES, *kind.head_datasets}

    def ids(shard: Shard, _: ShardResult) -> npt.NDArray[np.bytes_]:
        return np.array([name.encode() for name in store.frame_ids(shard.begin, shard.end)])

    columns: dict[str, _Column] = {IDS[plan.kind]: (0, h5py.string_dtype("utf-8", _id_bytes(store)), ids)}
    for model in plan.models if plan.embeddings != "none" else ():
        name = VECTOR_DATASETS[model.family] if plan.kind == "predict" else EMBED_VECTORS
        columns[name] = (model.spec.embedding_dim, plan.embeddings, vectors[model.family])
    return columns | {name: column for name, column in known.items() if name in names}


def _create_dataset(file: h5py.File, name: str, num_rows: int, width: int, dtype: Any) -> h5py.Dataset:
    """In HDF5 chunks of about 1 MB, with checksums; `width` 0 makes it one-dimensional."""
    dtype = np.dtype(dtype)
    shape = (num_rows, width) if width else (num_rows,)
    chunks = (min(num_rows, max(1, (1 << 20) // (max(1, width) * dtype.itemsize))), *shape[1:])
    compression = "gzip" if dtype.kind == "S" else None
    options = {"chunks": chunks, "fletcher32": True, "compression": compression} if num_rows else {}
    return file.create_dataset(name, shape, dtype, **options)


def _id_bytes(store: FrameStore) -> int:
    """Length in bytes of the longest id in the store: record name, chunk number, frame."""
    longest_name = int(store.names.lengths.max(initial=1))
    if store.meta.chunk_length is None:
        return longest_name
    chunk_digits = len(str(int(store.chunk_index.max(initial=0)) + 1))
    return longest_name + len("_chunk_") + chunk_digits + len(FRAME_NAMES[0])
