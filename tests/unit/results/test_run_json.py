"""The record of a run: speed, notes for readers, and result files."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest

from tests.made_lanes import counters, report
from tests.made_plans import PLAN
from virnuc_core.inference.events import GpuSample, LaneReport
from virnuc_core.results.fdr import SampleCalls
from virnuc_core.results.run_json import RunReport, lane_row, write_report
from virnuc_core.results.tables import TableCounts
from virnuc_core.versions import installed_version


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
    counts = TableCounts(
        records=3, rejected=0, chunks=9, scored_chunks=8, viral_chunks=6, frames=3,
        contigs_virus=1, contigs_other=1, contigs_unscored=1,
    )  # fmt: skip
    slow = replace(PLAN, warnings=("Triton is not installed.",))
    run = replace(run_of([report()]), plan=slow, counts=counts)
    assert run.document["warnings"] == ("Triton is not installed.",)
    assert run.document["notes"] == ["Triton is not installed."]
    for line in (
        "note: Triton is not installed.",
        "3 contigs: 1 virus, 1 other, 1 without a score;",
        "9 chunks: 6 virus, 2 other, 1 without a score",
    ):
        assert line in run.summary
    assert "Viruses among" not in run.summary
    assert run.document["sample"] is None
    assert "sample" not in {*run.document["counts"]}
    sample = SampleCalls(
        prior=0.5,
        share=0.125,
        share_low=0.1,
        fdr=0.05,
        threshold=0.93,
        expected_fdr=0.04,
        expected_false=0.04,
    )
    run = replace(run, counts=replace(counts, sample=sample))
    assert run.document["sample"] == asdict(sample)
    assert run.document["counts"] == {k: v for k, v in asdict(counts).items() if k != "sample"}
    line = "scored contigs: about 12.5 % (cautiously 10 %); false calls to expect: 0.04 of 1 (4 %), called from p_virus 0.93 on"
    assert line in run.summary
    row = lane_row(report())
    assert (row["host"], row["device_name"]) == ("box", "NVIDIA Made")
    assert (row["sequences"], row["sequences_per_second"], row["esm2_tokens_per_second"]) == (20, 2.0, 200.0)
    assert "gpu_utilization" not in row
    samples = tuple(GpuSample(lane=0, utilization=0.5 + n / 10, memory_bytes=n * 10**9) for n in range(3))
    busy = lane_row(replace(report(), gpu_samples=samples))
    assert (busy["gpu_utilization"], busy["gpu_memory_gb"]) == (0.6, 2.0)
    assert lane_row(report(shards=0, seconds=2.0))["sequences_per_second"] == 0.0
