"""The row of a run in MultiQC's report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_lanes import report
from tests.unit.results.test_run_json import run_of
from virnuc_core.inference.events import LaneReport
from virnuc_core.results.multiqc import write_multiqc
from virnuc_core.results.tables import TableCounts
from virnuc_core.run_folder import RunFolder

COUNTS = TableCounts(
    records=7, rejected=0, chunks=9, scored_chunks=8, viral_chunks=6, frames=3,
    contigs_virus=1, contigs_other=4, contigs_unscored=2,
)  # fmt: skip


@pytest.mark.parametrize(("lanes", "speed"), [([report()], {"throughput": 2.0}), ([], {})])
def test_a_row_has_calls_share_scored_and_speed(
    lanes: list[LaneReport], speed: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gut\u202e1").mkdir()
    monkeypatch.chdir(tmp_path / "gut\u202e1")
    folder = RunFolder(Path())  # `--out .`
    write_multiqc(folder, replace(run_of(lanes), counts=COUNTS).document)
    content = json.loads(folder.multiqc.read_text())
    calls = {"contigs_virus": 1, "contigs_other": 4, "contigs_unscored": 2}
    assert content["data"] == {"gut%E2%80%AE1": {**calls, "scored": 88.89, **speed, "esm2": 50.0}}
    assert {*calls, "scored", "throughput", "esm2", "dnabert_s"} == content["headers"].keys()
