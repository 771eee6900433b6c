"""The record of a run: speed, notes for readers, result files, and the row in MultiQC's report."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.made_lanes import counters, report
from tests.made_plans import PLAN
from virnuc_core.inference.events import GpuSample, LaneReport
from virnuc_core.results.multiqc import write_multiqc
from virnuc_core.results.run_json import RunReport, lane_row, write_report
from virnuc_core.results.sample import SampleCalls
from virnuc_core.results.tables import TableCounts
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import CHUNKS_BY_RECORD
from virnuc_core.versions import installed_version

COUNTS = TableCounts(
    records=7, rejected=0, chunks=9, scored_chunks=8, frames=3, short_contigs=3, proviruses=2,
    contigs_virus=1, contigs_provirus=1, contigs_nonviral=3, contigs_unscored=2, sample=None,
)  # fmt: skip
SAMPLE = SampleCalls(share=0.125, threshold=0.93, expected_fdr=0.04, expected_false=0.12)


def run_of(lanes: Sequence[LaneReport]) -> RunReport:
    return RunReport(
        plan=PLAN, out="/out", counts=None, work=counters(40), lanes=lanes, seconds={"embed": 9.0}, links={}
    )


@pytest.mark.parametrize(
    ("lanes", "speed"),
    [
        ([report()], 20 / 10),
        ([report(lane=0), report(lane=1)], 40 / 10),  # side by side
        ([report(lane=0), report(lane=1, begin=12.0)], 40 / 22),  # one after the other on one device
        ([report(lane=0), report(lane=1, shards=0, seconds=3.0)], 20 / 10),  # one that failed at once
        ([], 0.0),
    ],
)
def test_throughput_is_over_the_time_in_which_lanes_worked(lanes: list[LaneReport], speed: float) -> None:
    assert run_of(lanes).throughput["sequences_per_second"] == round(speed, 1)


def test_result_files_are_recorded(tmp_path: Path) -> None:
    out = tmp_path / "vectors.h5"
    out.write_bytes(b"vectors")
    write_report(tmp_path / "run.json", replace(run_of([report()]), out=str(out)))
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["lanes"][0]["host"] == "box"
    assert document["packing_efficiency"] == {"esm2": 0.5}
    digest = hashlib.sha256(b"vectors").hexdigest()
    assert document["files"] == [{"name": "vectors.h5", "size": 7, "sha256": digest}]


def test_the_core_reports_without_prefect_and_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        return "" if package in ("prefect", "mlflow") else installed_version(package)

    monkeypatch.setattr("virnuc_core.results.run_json.installed_version", version)
    versions = run_of([]).document["versions"]
    assert versions["torch"] == metadata.version("torch")
    assert not {"prefect", "mlflow"} & versions.keys()


def test_what_the_document_and_the_summary_say() -> None:
    slow = replace(PLAN, warnings=("Triton is not installed.",))
    run = replace(run_of([report()]), plan=slow, counts=COUNTS)
    assert run.document["warnings"] == ("Triton is not installed.",)
    assert run.document["notes"] == ["Triton is not installed."]
    for line in (
        "note: Triton is not installed.",
        "7 contigs: 1 virus, 1 provirus, 3 nonviral, 2 unscored; 0 records skipped",
    ):
        assert line in run.summary
    assert "expected false" not in run.summary
    assert run.document["sample"] is None
    assert "sample" not in {*run.document["counts"]}
    run = replace(run, counts=replace(COUNTS, sample=SAMPLE))
    assert run.document["sample"] == asdict(SAMPLE)
    assert run.document["counts"] == {k: v for k, v in asdict(COUNTS).items() if k != "sample"}
    assert "expected false positives: 0.1 (4.0%)" in run.summary
    row = lane_row(report())
    assert (row["host"], row["device_name"]) == ("box", "NVIDIA Made")
    assert (row["sequences"], row["sequences_per_second"], row["esm2_tokens_per_second"]) == (20, 2.0, 200.0)
    assert "gpu_utilization" not in row
    samples = tuple(GpuSample(lane=0, utilization=0.5 + n / 10, memory_bytes=n * 10**9) for n in range(3))
    busy = lane_row(replace(report(), gpu_samples=samples))
    assert (busy["gpu_utilization"], busy["gpu_memory_gb"]) == (0.6, 2.0)
    assert lane_row(report(shards=0, seconds=2.0))["sequences_per_second"] == 0.0


@pytest.mark.parametrize(
    ("plan", "counts", "caveat"),
    [
        (
            {},
            {"sample": replace(SAMPLE, expected_fdr=0.61)},
            r"most of the 3 viral calls are expected to be false positives \(61\.0%\)",
        ),
        ({}, {"sample": replace(SAMPLE, expected_fdr=0.5)}, None),
        ({}, {"short_contigs": 4}, "4 of 7 sequences are shorter than 200 bp"),
        ({"chunk_length": 199}, {}, "chunks of 200 to 4,000 bp.* --chunk-length 199"),
        ({"chunk_length": 4001}, {}, "--chunk-length 4001"),
        ({"chunk_length": 200}, {}, None),
        ({"chunk_length": CHUNKS_BY_RECORD}, {}, None),
        ({"chunk_length": 4001, "frames": "open"}, {"short_contigs": 7}, None),
    ],
)
def test_reasons_to_doubt_the_calls_are_told(
    plan: dict[str, Any], counts: dict[str, Any], caveat: str | None
) -> None:
    changed = replace(PLAN, **{"frames": "longest", "chunk_length": CHUNKS_BY_RECORD, **plan})
    notes = replace(run_of([]), plan=changed, counts=replace(COUNTS, **counts)).notes
    assert len(notes) == (caveat is not None)
    assert not caveat or re.search(caveat, notes[0])


@pytest.mark.parametrize(("lanes", "speed"), [([report()], {"throughput": 2.0}), ([], {})])
def test_a_row_of_multiqc_has_calls_share_scored_and_speed(
    lanes: list[LaneReport], speed: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gut\u202e1").mkdir()
    monkeypatch.chdir(tmp_path / "gut\u202e1")
    folder = RunFolder(Path())  # `--out .`
    write_multiqc(folder, replace(run_of(lanes), counts=COUNTS).document)
    content = json.loads(folder.multiqc.read_text())
    calls = {"contigs_virus": 1, "contigs_provirus": 1, "contigs_nonviral": 3, "contigs_unscored": 2}
    assert content["data"] == {"gut%E2%80%AE1": {**calls, "scored": 88.89, **speed, "esm2": 50.0}}
    assert {*calls, "scored", "throughput", "esm2", "dnabert_s"} == content["headers"].keys()
