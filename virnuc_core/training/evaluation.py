"""Metrics of a predict run on labelled sequences, and their record, `evaluation.json`."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from virnuc_core.errors import MismatchError
from virnuc_core.files import write_text
from virnuc_core.results.calls import VIRUS
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import EVALUATED_RUN, EVALUATION_FILES, RunFolder
from virnuc_core.specs import FRAME_KINDS, FrameRule
from virnuc_core.training.heads import known_calls
from virnuc_core.training.labels import RecordTable
from virnuc_core.training.metrics import KnownCalls, Metrics, measure

SCHEMA_VERSION: Final = 2


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


def measure_run(root: Path, run: RunReport, table: RecordTable) -> Evaluation:
    """Measures the run in `root / EVALUATED_RUN` and writes evaluation.json beside it.

    Raises:
        MismatchError: the run has other records than the table.
    """
    calls = calls_of_run(RunFolder(root / EVALUATED_RUN), run.plan.frames, table)
    levels = {level: measure(known) for level, known in calls.items()}
    evaluation = Evaluation(run=run, calls=calls, levels=levels)
    write_text(root / EVALUATION_FILES[0], json.dumps(evaluation.document, indent=1) + "\n")
    return evaluation


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
