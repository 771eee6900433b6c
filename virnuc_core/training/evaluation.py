"""Metrics of a predict run on labelled sequences, and their record, `evaluation.json`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from virnuc_core.columns import Float64
from virnuc_core.errors import MismatchError
from virnuc_core.files import write_text
from virnuc_core.results.run_json import RunReport
from virnuc_core.run_folder import EVALUATED_RUN, EVALUATION_FILES, RunFolder
from virnuc_core.sequences.frame_store import FrameStore
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
    store = FrameStore.open(folder.frames)
    if store.record_number.max(initial=0) > len(table.names):
        raise MismatchError(f"{folder.contigs} does not belong to the labelled records.")
    record = store.record_number - 1
    calls = {
        "chunks": table.known_calls(record[store.chunk_record], _scores(folder.chunks_parquet)),
        "contigs": table.known_calls(record, _scores(folder.contigs_parquet)),
    }
    levels = {level: measure(known) for level, known in calls.items()}
    evaluation = Evaluation(run=run, calls=calls, levels=levels)
    write_text(root / EVALUATION_FILES[0], json.dumps(evaluation.document, indent=1) + "\n")
    return evaluation


def _scores(table: Path) -> Float64:
    column = pq.read_table(table, columns=["virus_score"])["virus_score"]
    return np.asarray(column.to_numpy(), np.float64)
