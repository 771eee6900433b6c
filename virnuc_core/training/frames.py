"""The frames of labelled records: which of them are learnt from, and what the models and a head say of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from virnuc_core.inference.plan import RunPlan
from virnuc_core.inference.runner import Scorer
from virnuc_core.inference.shard import ShardCounters, ShardResult, iter_shard_results, sum_counters
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.training.labels import RecordTable
from virnuc_core.training.sampling import sample_weights, thin
from virnuc_core.training.split import PARTS
from virnuc_core.training.trainer import LabelledVectors

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCounts:
    """What one part has of one class."""

    part: str
    class_name: str
    is_viral: bool
    records: int
    groups: int
    frames: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnFrames:
    """Frames that stand for all of a part.

    Attributes:
        rows: int64 (n,), rows of the frame store, ascending.
        is_viral: bool (n,).
        weights: float64 (n,), how often each is drawn; sums to 1.
    """

    rows: Int64
    is_viral: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64]

    def with_features(self, features: npt.NDArray[np.float32]) -> LabelledVectors:
        """The same with their vectors (n, D)."""
        return LabelledVectors(features=features, is_viral=self.is_viral, weights=self.weights)


def record_of_frames(store: FrameStore) -> Int64:
    """int64 (F,): row of the record of each frame among all records of the input, unusable ones included."""
    return np.asarray(store.record_number[store.chunk_record[store.frame_chunk]] - 1)


def draw_frames(
    table: RecordTable,
    records: Int64,
    in_part: npt.NDArray[np.bool_],
    group_power: float,
    most: int,
    rng: np.random.Generator,
) -> DrawnFrames:
    """Frames of one part with their weights, at most about `most`.

    Args:
        table: all records.
        records: (F,), row of the record of each frame.
        in_part: (R,), whether a record belongs to the part.
        group_power: see `sample_weights`.
        most: how many frames.
        rng: source of the draws.
    """
    rows = np.flatnonzero(in_part[records])
    own = records[rows]
    weights = sample_weights(table.is_viral[own], table.groups[own], group_power)
    left, weights = thin(weights, most, rng)
    return DrawnFrames(rows=rows[left], is_viral=table.is_viral[own[left]], weights=weights)


def read_features(
    folder: RunFolder, plan: RunPlan, wanted: list[Int64]
) -> tuple[list[npt.NDArray[np.float32]], ShardCounters]:
    """The vectors of several sets of rows, read in one pass over all shards.

    Args:
        folder: the run's folder.
        plan: its plan.
        wanted: each int64 (n,), ascending rows.

    Returns:
        fp32 (n, D) of each set, and the work of all shards together.

    Raises:
        DamagedFileError: a shard is missing or not whole.
        MismatchError: a shard is of another run.
    """
    width = sum(model.spec.embedding_dim for model in plan.models)
    features = [np.empty((len(rows), width), np.float32) for rows in wanted]
    counters = []
    for shard, result in iter_shard_results(folder, plan):
        for rows, filled in zip(wanted, features, strict=True):
            begin, end = np.searchsorted(rows, (shard.begin, shard.end)).tolist()
            filled[begin:end] = _features(result)[rows[begin:end] - shard.begin]
        counters.append(result.counters)
    return features, sum_counters(counters)


def score_frames(folder: RunFolder, plan: RunPlan, head: Path, rows: Int64) -> npt.NDArray[np.float32]:
    """P(other) and P(virus) of frames, fp32 (n, 2), a shard at a time.

    Args:
        folder: the run's folder.
        plan: its plan.
        head: file of a head.
        rows: int64 (n,), ascending rows.

    Raises:
        CheckpointError: the head cannot be used.
        DamagedFileError: a shard is missing or not whole.
    """
    scorer = Scorer(head, "cpu")
    scores = np.empty((len(rows), 2), np.float32)
    for shard, result in iter_shard_results(folder, plan):
        begin, end = np.searchsorted(rows, (shard.begin, shard.end)).tolist()
        if begin < end and result.dna is not None:
            own = rows[begin:end] - shard.begin
            protein = None if result.protein is None else result.protein[own]
            scores[begin:end] = scorer.score(result.dna[own], protein)
    return scores


def count_parts(
    table: RecordTable, part: npt.NDArray[np.int8], records: Int64, is_usable: npt.NDArray[np.bool_]
) -> tuple[PartCounts, ...]:
    """Records, groups and frames by part and class, of records with an open frame.

    Args:
        table: all records.
        part: (R,), index into `PARTS`.
        records: (F,), row of the record of each frame.
        is_usable: (R,).
    """
    counts = []
    for number, name in enumerate(PARTS):
        for class_number, class_name in enumerate(table.class_names):
            own = (part == number) & (table.classes == class_number) & is_usable
            counts.append(
                PartCounts(
                    part=name,
                    class_name=class_name,
                    is_viral=class_number == 0,
                    records=int(own.sum()),
                    groups=len(np.unique(table.groups[own])),
                    frames=int(own[records].sum()),
                )
            )
    return tuple(counts)


def _features(result: ShardResult) -> npt.NDArray[np.float32]:
    """fp32 (n, D): the DNA vectors beside the protein vectors, where there are any."""
    vectors = [part for part in (result.dna, result.protein) if part is not None]
    return np.concatenate(vectors, axis=1).astype(np.float32)
