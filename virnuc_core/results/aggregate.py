"""All shards of a run in one file, in input order, a shard at a time."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from virnuc_core.atomic_write import atomic_path
from virnuc_core.checked_hdf5 import CHECKSUM_SUFFIX, new_hdf5, write_attributes
from virnuc_core.errors import MismatchError
from virnuc_core.inference.shard import ShardCounters, ShardResult, iter_shard_results, sum_counters
from virnuc_core.results.embeddings_file import (
    IDS,
    LENGTHS,
    SCORES,
    EmbeddingsColumn,
    attributes_of,
    vectors_name,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import RunPlan, Shard
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.translation import DNA_ALONE, ROW_NAMES

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
    with atomic_path(path) as temporary, new_hdf5(temporary) as file:
        columns = _create_columns(file, plan, store)
        total = sum_counters(_copy_shards(folder, plan, store, columns))
        checksums = {name + CHECKSUM_SUFFIX: column.checksum for name, column in columns.items()}
        write_attributes(file, {**attributes_of(plan), **checksums})
    _log.info("wrote %s: %d rows from %d shards", path, plan.num_rows, len(plan.shards))
    return total


def _create_columns(file: h5py.File, plan: RunPlan, store: FrameStore) -> dict[str, EmbeddingsColumn]:
    ids_dtype = h5py.string_dtype("utf-8", _id_bytes(store))
    columns: list[tuple[str, int, Any]] = [(IDS[plan.kind], 0, ids_dtype)]
    if plan.embeddings != "none":
        for model in plan.models:
            name = vectors_name(plan, model.family)
            columns.append((name, model.spec.embedding_dim, np.dtype(plan.embeddings)))
    if plan.head is not None:
        columns.append((SCORES, 2, np.dtype(np.float32)))
    if plan.kind == "embed":
        columns.append((LENGTHS, 0, np.dtype(np.int64)))
    return {name: EmbeddingsColumn(file, name, plan.num_rows, width, dtype) for name, width, dtype in columns}


def _copy_shards(
    folder: RunFolder, plan: RunPlan, store: FrameStore, columns: dict[str, EmbeddingsColumn]
) -> Iterator[ShardCounters]:
    """Copies every shard to its rows, and yields its counters."""
    for shard, result in iter_shard_results(folder, plan):
        for name, values in shard_columns(plan, store, shard, result).items():
            columns[name].append(values)
        yield result.counters


def shard_columns(
    plan: RunPlan, store: FrameStore, shard: Shard, result: ShardResult
) -> dict[str, npt.NDArray[Any]]:
    """What the embeddings file holds in the rows of a shard, by the names of its datasets."""
    ids = store.frame_ids(shard.begin, shard.end)
    columns: dict[str, npt.NDArray[Any]] = {IDS[plan.kind]: np.array([name.encode() for name in ids])}
    if result.dna is not None:
        columns[vectors_name(plan, "dnabert_s")] = result.dna
    if result.protein is not None:
        columns[vectors_name(plan, "esm2")] = result.protein
    if result.scores is not None:
        columns[SCORES] = result.scores
    if plan.kind == "embed":
        columns[LENGTHS] = store.record_length[shard.begin : shard.end]
    return columns


def _id_bytes(store: FrameStore) -> int:
    """Bytes that hold the longest id of a store: record name, chunk number, frame."""
    longest_name = int(store.names.lengths.max(initial=1))
    if store.meta.chunk_length is None:
        return longest_name
    chunk_digits = len(str(int(store.chunk_index.max(initial=0)) + 1))
    frame_name = ROW_NAMES[DNA_ALONE if store.meta.num_closed else 0]
    return longest_name + len("_chunk_") + chunk_digits + len(frame_name)
