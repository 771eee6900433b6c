"""All shards of a run in one file, in input order, a shard at a time."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np

from virnuc_core.atomic_write import atomic_path
from virnuc_core.errors import MismatchError
from virnuc_core.inference.shards import iter_shard_results
from virnuc_core.prediction import embeddings_file
from virnuc_core.run_plan import RunFolder, RunPlan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.shard_file import HDF5_VERSION, ShardCounters, sum_counters, write_attributes

_FRAME_NAME_BYTES: Final = 2

_log = logging.getLogger(__name__)


def aggregate(folder: RunFolder, plan: RunPlan, store: FrameStore, out: Path | None = None) -> ShardCounters:
    """Merges the shards of a run; memory is bounded by the largest shard.

    Args:
        folder: the run's folder.
        plan: its plan.
        store: its frame store, for the ids.
        out: where the file shall be; None is the run's `embeddings.h5`.

    Returns:
        The work of all shards together.

    Raises:
        DamagedFileError: a shard is missing or not whole.
        MismatchError: a shard or the store is of another run.
    """
    if (store.meta.content_sha256, store.num_frames) != (plan.input_digest, plan.num_rows):
        raise MismatchError(
            f"frame store {store.folder} is not the one that the run in {folder.root} was planned for. "
            "Start over with --force."
        )
    path = folder.embeddings if out is None else out
    with atomic_path(path) as temporary, h5py.File(temporary, "w", libver=HDF5_VERSION) as file:
        datasets = _create_datasets(file, plan, store)
        total = sum_counters(_copy_shards(folder, plan, store, datasets))
        write_attributes(file, embeddings_file.attributes_of(plan))
    _log.info("wrote %s: %d rows from %d shards", path, plan.num_rows, len(plan.shards))
    return total


def _create_datasets(file: h5py.File, plan: RunPlan, store: FrameStore) -> dict[str, h5py.Dataset]:
    ids_dtype = h5py.string_dtype("utf-8", _id_bytes(store))
    columns: list[tuple[str, int, Any]] = [(embeddings_file.IDS[plan.kind], 0, ids_dtype)]
    if plan.embeddings != "none":
        for model in plan.models:
            name = embeddings_file.vectors_name(plan, model.family)
            columns.append((name, model.spec.embedding_dim, np.dtype(plan.embeddings)))
    if plan.head is not None:
        columns.append((embeddings_file.SCORES, 2, np.dtype(np.float32)))
    if plan.kind == "embed":
        columns.append((embeddings_file.LENGTHS, 0, np.dtype(np.int64)))
    return {
        name: embeddings_file.create_dataset(file, name, plan.num_rows, width, dtype)
        for name, width, dtype in columns
    }


def _copy_shards(
    folder: RunFolder, plan: RunPlan, store: FrameStore, datasets: dict[str, h5py.Dataset]
) -> Iterator[ShardCounters]:
    """Copies every shard to its rows, and yields its counters."""
    for shard, result in iter_shard_results(folder, plan):
        rows = slice(shard.begin, shard.end)
        ids = datasets[embeddings_file.IDS[plan.kind]]
        ids[rows] = np.array([name.encode() for name in store.frame_ids(shard.begin, shard.end)], ids.dtype)
        if result.dna is not None:
            datasets[embeddings_file.vectors_name(plan, "dnabert_s")][rows] = result.dna
        if result.protein is not None:
            datasets[embeddings_file.vectors_name(plan, "esm2")][rows] = result.protein
        if result.scores is not None:
            datasets[embeddings_file.SCORES][rows] = result.scores
        if plan.kind == "embed":
            datasets[embeddings_file.LENGTHS][rows] = store.record_length[rows]
        yield result.counters


def _id_bytes(store: FrameStore) -> int:
    """Bytes that hold the longest id of a store: record name, chunk number, frame."""
    longest_name = int(store.names.lengths.max(initial=1))
    if store.meta.chunk_length is None:
        return longest_name
    chunk_digits = len(str(int(store.chunk_index.max(initial=0)) + 1))
    return longest_name + len("_chunk_") + chunk_digits + _FRAME_NAME_BYTES
