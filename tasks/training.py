"""A head from labelled frames: who learns and who is held out, the fit, its figures, and what is left of it all."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tasks.artifacts import show_markdown
from tasks.figures_page import number
from tasks.labelling import Labelled, known_calls
from tasks.model_card import HeadCard, head_card, head_page
from tasks.stage import stage
from tasks.tracking import MetricPoint, TrackedRun
from tasks.training_plots import reliability_figure, roc_figure, save_png
from virnuc_core.atomic_write import make_folder, write_text
from virnuc_core.errors import InputError
from virnuc_core.inference.shard import ShardCounters
from virnuc_core.models.classifier import classifier_fingerprint, save_classifier
from virnuc_core.results.calls import call_chunks, call_contigs
from virnuc_core.results.run_json import RunReport
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import RunPlan, read_plan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.translation import LEAST_BASES
from virnuc_core.training.frames import (
    PartCounts,
    count_parts,
    draw_frames,
    read_features,
    record_of_frames,
    score_frames,
)
from virnuc_core.training.labels import (
    RecordTable,
)
from virnuc_core.training.metrics import Figures, KnownCalls, figures_of
from virnuc_core.training.split import PARTS, TEST, TRAIN, VALIDATION, split_records
from virnuc_core.training.trainer import TrainedHead, TrainerSettings, train_head

_RECORD_COLUMNS: Final = ("record", "id", "class", "group", "part")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Everything that decides a head, apart from the vectors.

    Attributes:
        trainer: the fit itself.
        held_out: share of the groups of each class for validation, and again for the test.
        group_power: see `sample_weights`.
        most_frames: about how many frames are learnt from at most.
    """

    trainer: TrainerSettings
    held_out: float
    group_power: float
    most_frames: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Who learns and who is held out.

    Attributes:
        part: int8 (R,), index into `PARTS`.
        counts: what each part has of each class.
    """

    part: npt.NDArray[np.int8]
    counts: tuple[PartCounts, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedHead:
    """A head on the disk.

    Attributes:
        path: its file.
        fingerprint: SHA-256 of the file.
        trained: how it came about.
        levels: its figures on the test records, of chunks and of contigs.
        work: the work of all shards together.
    """

    path: Path
    fingerprint: str
    trained: TrainedHead
    levels: dict[str, Figures]
    work: ShardCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReport:
    """The end of a training.

    Attributes:
        run: the run that gave the vectors.
        head: what came of them.
        card: the head's card, Markdown.
    """

    run: RunReport
    head: FittedHead
    card: str

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            **self.run.document,
            "head": str(self.head.path),
            "head_fingerprint": self.head.fingerprint,
            "temperature": self.head.trained.temperature,
            "best_epochs": list(self.head.trained.best_epochs),
            "test": {level: asdict(figures) for level, figures in self.head.levels.items()},
        }

    @property
    def summary(self) -> str:
        """A few lines for a person."""
        lines = [
            f"test records, {level}: AUROC {number(figures.auroc)}, AUPRC {number(figures.auprc)}, F1 {number(figures.f1)}, "
            f"accuracy {number(figures.accuracy)} ({figures.scored} of {figures.count} with a score)"
            for level, figures in self.head.levels.items()
        ]
        return "\n".join([*lines, f"head: {self.head.path}", f"its card: {card_of(self.head.path)}"])


def card_of(head: Path) -> Path:
    """Where the card of a head lies."""
    return head.with_suffix(".md")


@stage
def divide(folder: RunFolder, table: RecordTable, settings: HeadSettings) -> Division:
    """Splits the records, before anything is computed for them, and writes down which is where.

    Raises:
        InputError: there is no open frame, or a class has too few groups of records.
    """
    store = FrameStore.open(folder.frames)
    if store.num_frames == 0 and store.meta.rows == "closed_chunks":
        raise InputError(
            f"every chunk of {LEAST_BASES} bases or more has an open frame, so there is nothing that a head for DNA alone would "
            "be for. Give longer records, or a longer --chunk-length."
        )
    if store.num_frames == 0:
        raise InputError(
            "no record has an open frame, so there is nothing to train on: every chunk has a stop codon in all six frames. "
            "Give longer records, or a shorter --chunk-length."
        )
    records = record_of_frames(store)
    is_usable = np.zeros(len(table.names), np.bool_)
    is_usable[records] = True
    part = split_records(table.is_viral, table.groups, is_usable, settings.held_out, settings.trainer.seed)
    make_folder(folder.training)
    written = dict(
        zip((store.record_number - 1).tolist(), store.record_names(0, store.num_records), strict=True)
    )
    lines = ["\t".join(_RECORD_COLUMNS)]
    for row, name in written.items():
        class_name = table.class_names[table.classes[row]]
        lines.append(f"{row + 1}\t{name}\t{class_name}\t{table.groups[row]}\t{PARTS[part[row]]}")
    write_text(folder.training / "records.tsv", "\n".join(lines) + "\n")
    return Division(part=part, counts=count_parts(table, part, records, is_usable))


@stage
def fit(
    folder: RunFolder, table: RecordTable, division: Division, settings: HeadSettings, out: Path
) -> FittedHead:
    """Fits, calibrates, writes and measures a head.

    Raises:
        DamagedFileError: a shard is missing or not whole.
        OSError: the head cannot be written.
    """
    plan, store = read_plan(folder.plan), FrameStore.open(folder.frames)
    records = record_of_frames(store)
    rng = np.random.default_rng(settings.trainer.seed)
    drawn = [
        draw_frames(table, records, division.part == part, settings.group_power, settings.most_frames, rng)
        for part in (TRAIN, VALIDATION)
    ]
    features, work = read_features(folder, plan, [one.rows for one in drawn])
    train, validation = (one.with_features(x) for one, x in zip(drawn, features, strict=True))
    trained = train_head(train, validation, settings.trainer)
    save_classifier(trained.classifier, out, _facts(plan, trained, settings))
    calls = _test_calls(folder, plan, store, table, division, out)
    levels = {level: figures_of(known) for level, known in calls.items()}
    save_png(roc_figure(calls), folder.training / "roc.png")
    save_png(reliability_figure(levels), folder.training / "reliability.png")
    document = {
        "settings": asdict(settings),
        "parts": [asdict(one) for one in division.counts],
        "temperature": trained.temperature,
        "best_epochs": trained.best_epochs,
        "history": [asdict(one) for one in trained.history],
        "test": {level: asdict(figures) for level, figures in levels.items()},
    }
    write_text(folder.training / "figures.json", json.dumps(document, indent=1) + "\n")
    return FittedHead(
        path=out, fingerprint=classifier_fingerprint(out), trained=trained, levels=levels, work=work
    )


def head_card_of(run: RunReport, labelled: Labelled, division: Division, settings: HeadSettings) -> HeadCard:
    """What the card of the head of a training run says besides figures."""
    return HeadCard(
        name=Path(run.out).name,
        plan=run.plan,
        files=labelled.files,
        genbank=labelled.genbank,
        counts=division.counts,
        trainer=settings.trainer,
        sampling={
            "held_out": settings.held_out,
            "group_power": settings.group_power,
            "most_frames": settings.most_frames,
        },
    )


@stage
def publish_head(
    folder: RunFolder, card: HeadCard, head: FittedHead, run: RunReport, tracked: TrackedRun
) -> TrainingReport:
    """Writes the head's card, and shows head and figures in Prefect and MLflow; the head becomes a model there."""
    text = head_card(card, head.trained, head.levels)
    write_text(card_of(head.path), text)
    show_markdown("virnuc-head", text, "The head and how good it is")
    for level, figures in head.levels.items():
        tracked.log_metrics({f"test_{level}_{name}": value for name, value in figures.numbers.items()})
    tracked.log_metrics({"temperature": head.trained.temperature})
    now = time.time()
    curves = [
        MetricPoint(key=f"member_{one.member}/{name}", value=value, step=one.epoch, time=now)
        for one in head.trained.history
        for name, value in (("train_loss", one.train_loss), ("validation_loss", one.validation_loss))
        if value is not None
    ]
    tracked.log_points(curves)
    files = ("records.tsv", "figures.json", "roc.png", "reliability.png")
    tracked.log_files([card_of(head.path), *(folder.training / name for name in files)])
    page = head_page(card, head.levels)
    tracked.register_model(card.registered_name, head.path, {"sha256": head.fingerprint}, page)
    tracked.describe(page)
    return TrainingReport(run=run, head=head, card=text)


def _test_calls(
    folder: RunFolder, plan: RunPlan, store: FrameStore, table: RecordTable, division: Division, head: Path
) -> dict[str, KnownCalls]:
    """Calls of the chunks and contigs of the test records, made as in a predict run."""
    is_test_record = division.part[store.record_number - 1] == TEST
    is_test_chunk = is_test_record[store.chunk_record]
    rows = np.flatnonzero(is_test_chunk[store.frame_chunk])
    scores = score_frames(folder, plan, head, rows)
    number_of_chunk = np.cumsum(is_test_chunk) - 1
    chunk_record = store.chunk_record[is_test_chunk]
    chunks = call_chunks(
        scores, number_of_chunk[store.frame_chunk[rows]], store.frame_number[rows], len(chunk_record)
    )
    contigs = call_contigs(chunks, chunk_record, store.num_records)
    own = np.flatnonzero(is_test_record)
    chunk_rows = store.record_number[chunk_record] - 1
    return {
        "chunks": known_calls(chunks.is_virus, chunks.p_virus, chunk_rows, table),
        "contigs": known_calls(
            contigs.is_virus[own], contigs.mean_p[own], store.record_number[own] - 1, table
        ),
    }


def _facts(plan: RunPlan, trained: TrainedHead, settings: HeadSettings) -> Mapping[str, Any]:
    """What the file of the head says about itself."""
    return {
        "virnuc_version": plan.virnuc_version,
        "chunk_length": plan.chunk_length,
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
        "settings": asdict(settings),
        "best_epochs": trained.best_epochs,
        "temperature": trained.temperature,
    }
