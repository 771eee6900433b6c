"""Metrics of a predict run's calls against the known classes of its records."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tasks.artifacts import show_markdown
from tasks.pages.markdown import cell, code
from tasks.pages.metrics_page import figures_lines, number, overview_lines
from tasks.pages.plots import reliability_figure, roc_figure, save_png
from tasks.stages import resumable_task
from tasks.tracking import TrackedRun
from virnuc_core.errors import MismatchError
from virnuc_core.files import write_text
from virnuc_core.results.calls import VIRUS
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.tables import DNA_ALONE_STATUS
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import RunFolder
from virnuc_core.training.heads import known_calls
from virnuc_core.training.labels import RecordTable
from virnuc_core.training.metrics import KnownCalls, Metrics, measure

SCHEMA_VERSION: Final = 1
RUN_NAME: Final = "run"
FIGURES_NAME: Final = "evaluation.json"
PAGE_NAME: Final = "evaluation.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Result of an evaluation.

    Attributes:
        out: folder of the metrics; the predict run is in `run` there.
        levels: metrics of chunks, of contigs, and of chunks with a DNA-only score if there are any.
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
            "inputs": [asdict(file) for file in plan.inputs],
            "head": {"name": head.name, "fingerprint": head.fingerprint} if head else None,
            "models": {
                model.family: {"name": model.name, "weights_fingerprint": model.weights_fingerprint}
                for model in plan.models
            },
            **{level: asdict(figures) for level, figures in self.levels.items()},
        }

    @property
    def heading(self) -> list[str]:
        """What was measured, as lines of Markdown."""
        plan = self.run.plan
        models = " and ".join(f"{cell(model.name)} ({model.arithmetic})" for model in plan.models)
        return [
            f"# Evaluation of {cell(plan.head.name if plan.head else '')}",
            "",
            f"Models: {models}. Chunks of {plan.chunk_length} bp. "
            f"Input: {', '.join(cell(file.name) for file in plan.inputs)}.",
            "",
            f"Head: {code(plan.head.fingerprint if plan.head else '')}",
            "",
        ]

    @property
    def page(self) -> str:
        """The whole report as Markdown."""
        return "\n".join([*self.heading, *figures_lines(self.levels)]).rstrip() + "\n"

    @property
    def summary(self) -> str:
        """A few lines for the terminal."""
        lines = [
            f"{level}: AUROC {number(figures.auroc)}, AUPRC {number(figures.auprc)}, F1 {number(figures.f1)}, "
            f"accuracy {number(figures.accuracy)} ({figures.scored} of {figures.count} with a score)"
            for level, figures in self.levels.items()
        ]
        return "\n".join([*lines, f"results: {self.out}"])


@resumable_task
def evaluate_run(out: Path, run: RunReport, table: RecordTable, tracked: TrackedRun) -> EvaluationReport:
    """Computes metrics of the run in `out / RUN_NAME` and writes them beside it.

    Raises:
        MismatchError: the run has other records.
    """
    calls = calls_of_run(RunFolder(out / RUN_NAME), table)
    levels = {level: measure(known) for level, known in calls.items()}
    report = EvaluationReport(out=str(out), run=run, levels=levels)
    write_text(out / FIGURES_NAME, json.dumps(report.document, indent=1) + "\n")
    write_text(out / PAGE_NAME, report.page)
    save_png(roc_figure(calls), out / "roc.png")
    save_png(reliability_figure(levels), out / "reliability.png")
    show_markdown("virnuc-evaluation", report.page, "How good the calls are")
    for level, figures in levels.items():
        tracked.log_metrics({f"{level}_{name}": value for name, value in figures.numbers.items()})
    names = (FIGURES_NAME, PAGE_NAME, "roc.png", "reliability.png")
    tracked.log_files([out / name for name in names])
    tracked.describe("\n".join([*report.heading, *overview_lines(levels)]) + "\n")
    return report


def calls_of_run(folder: RunFolder, table: RecordTable) -> dict[str, KnownCalls]:
    """Calls of a run by level: chunks, contigs, and separately chunks with a DNA-only score.

    Raises:
        MismatchError: the run has other records.
    """
    record: dict[str, int] = {}
    contigs: list[tuple[int, str, str]] = []
    for row in _rows(folder.contigs):
        record[row["contig"]] = int(row["record"]) - 1
        contigs.append((record[row["contig"]], row["mean_p"], row["call"]))
    if contigs and max(contigs)[0] >= len(table.names):
        raise MismatchError(f"{folder.contigs} is of other records than those that are labelled.")
    chunks: list[tuple[int, str, str]] = []
    dna_alone: list[tuple[int, str, str]] = []
    for row in _rows(folder.predictions):
        by_status = dna_alone if row["status"] == DNA_ALONE_STATUS else chunks
        by_status.append((record[row["contig"]], row["p_virus"], row["call"]))
    levels = {"chunks": chunks, "contigs": contigs} | ({"dna_alone_chunks": dna_alone} if dna_alone else {})
    return {level: _known(calls, table) for level, calls in levels.items()}


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
