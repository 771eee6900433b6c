"""Metrics of a predict run on labelled sequences, and their record, `evaluation.json`."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from virnuc_core.errors import MismatchError
from virnuc_core.files import write_text
from virnuc_core.results.calls import VIRUS
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import EVALUATED_RUN, EVALUATION_FILES, RunFolder
from virnuc_core.specs import FRAME_KINDS
from virnuc_core.training.labels import RecordTable
from virnuc_core.training.metrics import KnownCalls, Metrics, measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        run: its predict run.
        calls: calls of the labelled records by level: chunks and contigs.
        levels: their metrics.
    """

    run: RunReport
    calls: dict[str, KnownCalls]
    levels: dict[str, Metrics]

    @property
    def document(self) -> dict[str, Any]:
        """Content of evaluation.json."""
        plan = self.run.plan
        head = plan.head
        return {
            "schema_version": 2,
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


def measure_run(root: Path, run: RunReport, table: RecordTable) -> Evaluation:
    """Measures the run in `root / EVALUATED_RUN` and writes evaluation.json beside it."""
    folder = RunFolder(root / EVALUATED_RUN)
    contigs = list(_rows(folder.contigs))
    record = {row["contig"]: int(row["record"]) - 1 for row in contigs}
    if max(record.values(), default=-1) >= len(table.names):
        raise MismatchError(f"{folder.contigs} is of other records than those that are labelled.")
    calls = {
        "chunks": _known(table, record, _rows(folder.predictions), "p_virus"),
        "contigs": _known(table, record, contigs, FRAME_KINDS[run.plan.frames].call_column),
    }
    levels = {level: measure(known) for level, known in calls.items()}
    evaluation = Evaluation(run=run, calls=calls, levels=levels)
    write_text(root / EVALUATION_FILES[0], json.dumps(evaluation.document, indent=1) + "\n")
    return evaluation


def _known(
    table: RecordTable, record: Mapping[str, int], rows: Iterable[Mapping[str, str]], p_column: str
) -> KnownCalls:
    calls = [(record[row["contig"]], row["call"] == VIRUS, row[p_column]) for row in rows]
    return table.known_calls(
        np.array([row for row, _, _ in calls], np.int64),
        [is_called for _, is_called, _ in calls],
        np.array([np.nan if p == NOT_AVAILABLE else float(p) for _, _, p in calls], np.float64),
    )


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        # No quotes: a name may begin with one.
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
