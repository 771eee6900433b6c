"""Trains a head from labelled records: splits them, fits it, measures it on the test records, and writes it."""

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import Bool, Float32, Int64, offsets_of
from virnuc_core.errors import InputError
from virnuc_core.files import file_digest, make_folder, write_text
from virnuc_core.inference.plan import RunPlan, read_plan
from virnuc_core.inference.runner import Scorer
from virnuc_core.inference.shard import ShardCounters, ShardResult, iter_shard_results, sum_counters
from virnuc_core.models.catalogue import NOT_CALIBRATED
from virnuc_core.models.heads import ContigHead, Head, HeadSpec, load_head, save_head
from virnuc_core.models.scores import ScoredRows
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import LEAST_RESIDUES
from virnuc_core.sequences.reader import input_digest
from virnuc_core.settings import TrainerSettings
from virnuc_core.specs import InputFile
from virnuc_core.training.contigs import MOST_CHUNKS, LabelledRuns, LossWeights, embed_pieces, fit_novelty
from virnuc_core.training.fit import (
    TrainedHead,
    train_contig_head,
    train_head,
    vectors_of,
)
from virnuc_core.training.labels import (
    OTHER,
    VIRAL,
    LabelledFiles,
    RecordTable,
    open_sources,
    read_records,
    read_table,
)
from virnuc_core.training.metrics import KnownCalls, Metrics, measure
from virnuc_core.training.split import (
    PARTS,
    TEST,
    TRAIN,
    VALIDATION,
    kept_share,
    sample_weights,
    split_records,
)

# Groups of each kind in the validation part; with fewer, a head keeps its scores as they are.
LEAST_TO_CALIBRATE: Final = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCounts:
    """Usable records, their groups and frames, of one class in one part."""

    part: str
    class_name: str
    records: int
    groups: int
    frames: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """Labelled records and their origin: `files` as given, without the table of labels, and the sequence files to read."""

    files: tuple[InputFile, ...]
    paths: tuple[str, ...]
    table: RecordTable
    genbank: Counter[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSplit:
    """Assignment of records to parts.

    Attributes:
        part: int8 (R,), indexes `PARTS`.
        counts: one entry per part and class.
        validation_groups: groups of usable viral records, and of others, to calibrate a head with.
        test_groups: the same, to measure it with.
    """

    part: npt.NDArray[np.int8]
    counts: tuple[PartCounts, ...]
    validation_groups: tuple[int, int]
    test_groups: tuple[int, int]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about what the scores and figures of a head will not be good for."""
        few, found = 30, []
        advice = "Give more dissimilar records, or a larger --held-out."
        groups = "Groups of {} records: {} viral and {} other".format
        if (fewest := min(self.validation_groups)) < few:
            there_are = groups("validation", *self.validation_groups)
            found.append(
                f"The head {NOT_CALIBRATED}. {there_are}, and at least {LEAST_TO_CALIBRATE} of each are needed. {advice}"
                if fewest < LEAST_TO_CALIBRATE
                else f"The calibration is uncertain. {there_are}. {advice}"
            )
        if min(self.test_groups) < few:
            found.append(f"The metrics are uncertain. {groups('test', *self.test_groups)}. {advice}")
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedHead:
    """A head written to `path`.

    Attributes:
        fingerprint: SHA-256 of the file.
        calls: those of the test records, by level (chunks, contigs).
        levels: their metrics.
        warnings: sentences about what the figures and scores are not good for.
    """

    path: Path
    fingerprint: str
    trained: TrainedHead
    calls: dict[str, KnownCalls]
    levels: dict[str, Metrics]
    work: ShardCounters
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A computed run over labelled records; `part` (R,) indexes `PARTS`."""

    folder: RunFolder
    plan: RunPlan
    store: FrameStore
    table: RecordTable
    part: npt.NDArray[np.int8]


def label_records(files: LabelledFiles, folder: RunFolder, groups: str | None, *, kinship: bool) -> Labelled:
    """Reads every labelled record once.

    GenBank files are converted inside `folder`; `groups` is a table of related records; `kinship` also groups similar records.
    """
    sources, genbank = open_sources(files, folder.sequences)
    own_groups = read_table(groups, "group") if groups else {}
    table = read_records(sources, own_groups, kinship=kinship)
    digests = tuple(map(input_digest, files.sequences))
    return Labelled(files=digests, paths=tuple(sources), table=table, genbank=genbank)


def split_labelled(folder: RunFolder, table: RecordTable, settings: TrainerSettings) -> RecordSplit:
    """Splits the records, before anything is computed for them, and writes records.tsv."""
    store = FrameStore.open(folder.frames)
    if store.num_frames == 0:
        nothing = {
            "open": "an open reading frame, so there is nothing to train on: every chunk has a stop codon in all six frames. "
            "Give longer records, a shorter --chunk-length, or --frames longest.",
            "longest": f"an ORF of {LEAST_RESIDUES} codons, so there is nothing to train on. Give longer records.",
        }
        raise InputError(f"no record has {nothing[store.meta.frames]}")
    num_frames = np.bincount(record_of_frames(store), minlength=len(table.names))
    is_usable = num_frames > 0
    part = split_records(table.is_viral, table.groups, is_usable, settings.held_out, settings.seed)
    make_folder(folder.training)
    write_text(folder.training / "records.tsv", _records_table(store, table, part))

    def count(part_number: int, class_name: str, of_class: Bool) -> PartCounts:
        own = (part == part_number) & of_class & is_usable
        return PartCounts(
            part=PARTS[part_number],
            class_name=class_name,
            records=int(own.sum()),
            groups=len(np.unique(table.groups[own])),
            frames=int(num_frames[own].sum()),
        )

    def count_groups(part_number: int) -> tuple[int, int]:
        kinds = ((VIRAL, table.is_viral), (OTHER, ~table.is_viral))
        viral, other = (count(part_number, *kind).groups for kind in kinds)
        return viral, other

    split = RecordSplit(
        part=part,
        counts=tuple(
            count(part_number, name, table.classes == class_number)
            for part_number in (TRAIN, VALIDATION, TEST)
            for class_number, name in enumerate(table.class_names)
        ),
        validation_groups=count_groups(VALIDATION),
        test_groups=count_groups(TEST),
    )
    for warning in split.warnings:
        _log.warning(warning)
    return split


def _records_table(store: FrameStore, table: RecordTable, part: npt.NDArray[np.int8]) -> str:
    lines = ["record\tseq_name\tclass\tgroup\tpart"]
    names = store.record_names(0, store.num_records)
    for number, name in zip(store.record_number.tolist(), names, strict=True):
        class_name = table.class_names[table.classes[number - 1]]
        lines.append(f"{number}\t{name}\t{class_name}\t{table.groups[number - 1]}\t{PARTS[part[number - 1]]}")
    return "\n".join(lines) + "\n"


def fit_head(
    folder: RunFolder, table: RecordTable, split: RecordSplit, settings: TrainerSettings, out: Path
) -> FittedHead:
    """Fits, calibrates, writes and measures a head."""
    data = TrainingData(folder, read_plan(folder.plan), FrameStore.open(folder.frames), table, split.part)
    [train, validation], work = read_samples(data, settings)
    calibrate = min(split.validation_groups) >= LEAST_TO_CALIBRATE
    if data.plan.frames == "open":
        trained = train_head(vectors_of(train), vectors_of(validation), settings, calibrate=calibrate)
    else:
        trained = _fit_contig_head(data, train, validation, settings, calibrate=calibrate)
    warnings = split.warnings
    if calibrate and trained.temperature is None:
        warnings += (
            f"The head {NOT_CALIBRATED}. It separates the validation records perfectly or hardly at all, so no temperature is "
            "best. Give more varied records.",
        )
        _log.warning(warnings[-1])
    fitted: dict[str, Any] = {"best_epoch": trained.best_epoch, "temperature": trained.temperature}
    if data.plan.frames == "longest":
        fitted |= {"contig_temperature": trained.contig_temperature, "loss": asdict(LossWeights())}
    stated = {**_facts(data.plan), "calibrated": trained.temperature is not None}
    save_head(trained.head, out, {**stated, "settings": settings.fit, **fitted})
    calls = calls_of_test_records(data, load_head(out))
    levels = {level: measure(known) for level, known in calls.items()}
    document = {
        "settings": settings.fit,
        "parts": [asdict(one) for one in split.counts],
        **fitted,
        "warnings": warnings,
        "history": [asdict(one) for one in trained.history],
        "test": {level: asdict(metrics) for level, metrics in levels.items()},
    }
    write_text(folder.training / "figures.json", json.dumps(document, indent=1) + "\n")
    return FittedHead(
        path=out,
        fingerprint=file_digest(out),
        trained=trained,
        calls=calls,
        levels=levels,
        work=work,
        warnings=warnings,
    )


def _facts(plan: RunPlan) -> dict[str, Any]:
    return {
        "virnuc_version": plan.virnuc_version,
        "chunk_length": plan.chunk_length,
        "frames": plan.frames,
        "input_digest": plan.input_digest,
        "models": {
            model.family: {
                "name": model.name,
                "weights_fingerprint": model.weights_fingerprint,
                "repr_layer": model.repr_layer,
                "precision": model.precision,
            }
            for model in plan.models
        },
    }


def _fit_contig_head(
    data: TrainingData,
    train: LabelledRuns,
    validation: LabelledRuns,
    settings: TrainerSettings,
    *,
    calibrate: bool,
) -> TrainedHead:
    dna_width, protein_width = (model.spec.embedding_dim for model in data.plan.models)
    classes = data.table.class_names
    spec = HeadSpec(dna_width=dna_width, protein_width=protein_width, classes=classes, num_virus=1)
    trained = train_contig_head(train, validation, spec, settings, calibrate=calibrate)
    assert isinstance(trained.head, ContigHead)
    own, _ = embed_pieces(trained.head, train, settings.seed)
    held_out, run = embed_pieces(trained.head, validation, settings.seed)
    fit_novelty(trained.head, own, held_out, validation.records[run], settings.seed)
    return trained


def calls_of_test_records(data: TrainingData, head: Head) -> dict[str, KnownCalls]:
    """Calls of the chunks and contigs of the test records, made as in a predict run."""
    store, table, scorer = data.store, data.table, Scorer(head, "cpu")
    is_test = data.part[store.record_number - 1] == TEST
    is_chunk = is_test[store.chunk_record]
    rows = np.flatnonzero(is_chunk[store.frame_chunk])
    parts = []
    for shard, result in iter_shard_results(data.folder, data.plan):
        own = rows[slice(*np.searchsorted(rows, (shard.begin, shard.end)))]
        parts.append(scorer.score(_features(result)[own - shard.begin], sizes=store.sizes(own)))
    results = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    scored = ScoredRows(
        read=lambda name, begin, end: results[name][begin:end],
        chunk=(np.cumsum(is_chunk) - 1)[store.frame_chunk[rows]],
        contig=(np.cumsum(is_test) - 1)[store.chunk_record[is_chunk]],
        num_contigs=int(is_test.sum()),
    )
    scores = head.score_contigs(scored)
    record = store.record_number[is_test] - 1
    return {
        "chunks": table.known_calls(record[scored.contig], scores.p_chunk),
        "contigs": table.known_calls(record, scores.p_contig),
    }


def record_of_frames(store: FrameStore) -> Int64:
    """int64 (F,): row of the record of each frame among all records of the input, including unusable ones."""
    return np.asarray(store.record_number[store.chunk_record[store.frame_chunk]] - 1)


def sample_runs(
    data: TrainingData,
    part: int,
    settings: TrainerSettings,
    rng: np.random.Generator,
    most_chunks: int = MOST_CHUNKS,
) -> tuple[Int64, LabelledRuns]:
    """Samples runs of up to `most_chunks` consecutive chunks with a row, about `most_frames` frames of a part in all.

    Returns:
        Ascending rows of the frame store, int64 (n,), and the runs of these, whose features are still to be filled in.
    """
    table, records = data.table, record_of_frames(data.store)
    rows = np.flatnonzero(data.part[records] == part)
    own = records[rows]
    weights = sample_weights(table.is_viral[own], table.groups[own], settings.group_power)
    chunk_begins = np.flatnonzero(np.diff(data.store.frame_chunk[rows], prepend=-1))
    chunk_record = own[chunk_begins]
    record_begins = np.flatnonzero(np.diff(chunk_record, prepend=-1))
    counts = np.diff(record_begins, append=len(chunk_record))
    place = np.arange(len(chunk_record)) - np.repeat(record_begins, counts)
    run_begins = np.flatnonzero(place % most_chunks == 0)
    first_rows = chunk_begins[run_begins]
    # All frames of a record have the same share.
    share = kept_share(weights, settings.most_frames)[first_rows]
    run_weights = np.add.reduceat(weights, first_rows) / share
    is_kept = rng.random(len(share)) < share
    chunk_counts = np.diff(run_begins, append=len(chunk_begins))
    is_kept_chunk = np.repeat(is_kept, chunk_counts)
    row_counts = np.diff(chunk_begins, append=len(rows))
    kept = rows[np.repeat(is_kept_chunk, row_counts)]
    kept_records = chunk_record[run_begins[is_kept]]
    width = sum(model.spec.embedding_dim for model in data.plan.models)
    return kept, LabelledRuns(
        features=np.empty((len(kept), width), np.float32),
        sizes=data.store.sizes(kept),
        first_row=offsets_of(row_counts[is_kept_chunk]),
        first_chunk=offsets_of(chunk_counts[is_kept]),
        records=kept_records,
        classes=table.classes[kept_records],
        groups=table.groups[kept_records],
        weights=run_weights[is_kept] / run_weights[is_kept].sum(),
    )


def read_samples(data: TrainingData, settings: TrainerSettings) -> tuple[list[LabelledRuns], ShardCounters]:
    """Samples of the training and of the validation records, and the work of the run, from one pass over it."""
    rng = np.random.default_rng(settings.seed)
    sampled = [sample_runs(data, part, settings, rng) for part in (TRAIN, VALIDATION)]
    counters = []
    for shard, result in iter_shard_results(data.folder, data.plan):
        vectors = _features(result)
        for rows, runs in sampled:
            begin, end = np.searchsorted(rows, (shard.begin, shard.end)).tolist()
            runs.features[begin:end] = vectors[rows[begin:end] - shard.begin]
        counters.append(result.counters)
    return [runs for _, runs in sampled], sum_counters(counters)


def _features(result: ShardResult) -> Float32:
    """fp32 (n, D): the DNA vectors beside the protein vectors."""
    vectors = [part for part in (result.dna, result.protein) if part is not None]
    return np.concatenate(vectors, axis=1).astype(np.float32)
