"""Ends of the flows about heads: metrics of a training and of an evaluation, on disk and in Prefect."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tasks.artifacts import show_markdown
from tasks.pages.head_pages import evaluation_page, head_card, scores_in_words
from tasks.pages.plots import reliability_figure, roc_figure, save_png
from tasks.run_entries import EVALUATED_RUN, EVALUATION
from tasks.stages import Resumable
from virnuc_core.errors import MismatchError
from virnuc_core.files import write_text
from virnuc_core.pipeline import Training
from virnuc_core.results.calls import VIRUS
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FRAME_KINDS, FrameRule
from virnuc_core.training.heads import FittedHead, known_calls
from virnuc_core.training.labels import RecordTable
from virnuc_core.training.metrics import KnownCalls, Metrics, measure

SCHEMA_VERSION: Final = 2  # of evaluation.json
_PLOTS: Final = ("roc.png", "reliability.png")
EVALUATION_FILES: Final = ("evaluation.json", "evaluation.md", *_PLOTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReport:
    """Result of a training run; `run` computed the vectors."""

    run: RunReport
    head: FittedHead

    @property
    def document(self) -> dict[str, Any]:
        """The document for `--json`."""
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
        """A few lines for the terminal."""
        lines = [f"test records, {line}" for line in scores_in_words(self.head.levels)]
        lines += [f"head: {self.head.path}", f"its card: {card_of(self.head.path)}"]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Result of an evaluation.

    Attributes:
        out: folder of the metrics; the predict run is in `run` there.
        levels: metrics of chunks and of contigs.
    """

    out: str
    run: RunReport
    levels: dict[str, Metrics]

    @property
    def document(self) -> dict[str, Any]:
        """Content of evaluation.json."""
        plan = self.run.plan
        head = plan.head
        return {
            "schema_version": SCHEMA_VERSION,
            "virnuc_version": plan.virnuc_version,
            "plan_fingerprint": plan.fingerprint,
            "chunk_length": plan.chunk_length,
            "frames": plan.frames,
            "inputs": [asdict(file) for file in plan.inputs],
            "head": {"name": head.name, "fingerprint": head.fingerprint} if head else None,
            "models": {
                model.family: {"name": model.name, "weights_fingerprint": model.weights_fingerprint}
                for model in plan.models
            },
            **{level: asdict(figures) for level, figures in self.levels.items()},
        }

    @property
    def summary(self) -> str:
        """A few lines for the terminal."""
        return "\n".join([*scores_in_words(self.levels), f"results: {self.out}"])


def card_of(head: Path) -> Path:
    """Path of a head's card."""
    return head.with_suffix(".md")


@Resumable
def publish_head(run: Training) -> TrainingReport:
    """Writes the head's card, and shows head and metrics in Prefect."""
    text = head_card(run, run.head.levels)
    write_text(card_of(run.head.path), text)
    show_markdown("virnuc-head", text, "The head and how good it is")
    _draw(run.folder.training, run.head.calls, run.head.levels)
    return TrainingReport(run=run.report, head=run.head)


@Resumable
def evaluate_run(out: Path, run: RunReport, table: RecordTable) -> EvaluationReport:
    """Computes metrics of the run in `out / EVALUATED_RUN` and writes them beside it.

    Raises:
        MismatchError: the run has other records.
    """
    calls = calls_of_run(RunFolder(out / EVALUATED_RUN), run.plan.frames, table)
    levels = {level: measure(known) for level, known in calls.items()}
    report = EvaluationReport(out=str(out), run=run, levels=levels)
    page = evaluation_page(run.plan, levels)
    write_text(out / EVALUATION, json.dumps(report.document, indent=1) + "\n")
    write_text(out / "evaluation.md", page)
    show_markdown("virnuc-evaluation", page, "How good the calls are")
    _draw(out, calls, levels)
    return report


def calls_of_run(folder: RunFolder, frames: FrameRule, table: RecordTable) -> dict[str, KnownCalls]:
    """Calls of a run by level: chunks and contigs."""
    record: dict[str, int] = {}
    contigs: list[tuple[int, str, str]] = []
    for row in _rows(folder.contigs):
        record[row["contig"]] = int(row["record"]) - 1
        p_call = row[FRAME_KINDS[frames].call_column]
        contigs.append((record[row["contig"]], p_call, row["call"]))
    if contigs and max(contigs)[0] >= len(table.names):
        raise MismatchError(f"{folder.contigs} is of other records than those that are labelled.")
    chunks = [(record[row["contig"]], row["p_virus"], row["call"]) for row in _rows(folder.predictions)]
    return {"chunks": _known(chunks, table), "contigs": _known(contigs, table)}


def _known(calls: list[tuple[int, str, str]], table: RecordTable) -> KnownCalls:
    return known_calls(
        [call == VIRUS for _, _, call in calls],
        np.array([np.nan if p == NOT_AVAILABLE else float(p) for _, p, _ in calls], np.float64),
        np.array([row for row, _, _ in calls], np.int64),
        table,
    )


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        # No quotes: a name may begin with one.
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _draw(folder: Path, calls: dict[str, KnownCalls], levels: dict[str, Metrics]) -> None:
    for name, figure in zip(_PLOTS, (roc_figure(calls), reliability_figure(levels)), strict=True):
        save_png(figure, folder / name)
