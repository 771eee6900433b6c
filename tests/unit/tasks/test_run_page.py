from dataclasses import replace

import pytest

from tasks.pages.run_page import packing_rows, run_page, speed_rows, verdict
from tests.made_lanes import counters, report
from tests.made_plans import PLAN, model
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.tables import TableCounts
from virnuc_core.specs import InputFile

COUNTS = TableCounts(
    records=1800,
    rejected=3,
    chunks=5000,
    scored_chunks=4000,
    viral_chunks=900,
    frames=7000,
    contigs_virus=500,
    contigs_other=1200,
    contigs_unscored=100,
)
RUN = RunReport(
    plan=replace(PLAN, models=(model("esm2", name="my_model"),)),
    out="/results/sample",
    counts=COUNTS,
    work=counters(20),
    lanes=[report()],
    seconds={"index": 1.0, "embed": 12.0},
    links={},
)


def test_page_has_the_verdict_the_models_the_speed_and_the_places() -> None:
    page = run_page(RUN, {"report": "/results/sample/run.json", "MLflow": "http://mlflow/1"})
    for part in (
        "# 500 of 1,800 contigs called virus\n",
        "| contigs | 500 | 1,200 | 100 | 1,800 |",
        "| chunks | 900 | 3,100 | 1,000 | 5,000 |",
        "3 records cannot be used",
        r"| ESM-2 my\_model | 8 | fp32, packed engine, sdpa attention | 50.0% | `aaaaaaaaaaaa` |",
        "2 of 2 shards computed in 1 lane: **2 sequences/s**, 200 residues/s, 13 s in all.",
        "- results: `/results/sample`",
        "- MLflow: [http://mlflow/1](http://mlflow/1)",
    ):
        assert part in page


def test_names_of_files_are_no_markup() -> None:
    files = tuple(InputFile(name=f"<{i}>|.fa", size=1_000_000, sha256="") for i in range(5))
    page = run_page(replace(RUN, plan=replace(RUN.plan, inputs=files)), {})
    assert r"Input: **&lt;0&gt;\|.fa**, **&lt;1&gt;\|.fa**, **&lt;2&gt;\|.fa** and 2 more (5 MB)" in page


def test_run_that_had_nothing_to_compute_says_so() -> None:
    assert "All 2 shards were there from before" in run_page(replace(RUN, lanes=[]), {})
    assert "1 of 2 shards computed in 1 lane (1 were there from before)" in run_page(
        replace(RUN, lanes=[report(shards=1)]), {}
    )


def test_run_without_calls_counts_sequences() -> None:
    run = replace(RUN, counts=None)
    assert verdict(run) == "20 sequences embedded"
    assert "| contigs" not in run_page(run, {})


def test_tables_have_a_row_a_lane_and_a_row_a_model() -> None:
    (lane,) = speed_rows(RUN)
    assert (lane["hardware"], lane["ESM-2 tokens/s"], lane["load s"]) == ("NVIDIA Made (cuda:0)", 200.0, 2.0)
    (packing,) = packing_rows(RUN)
    assert (packing["packing efficiency"], packing["batches"]) == ("50.0%", 2)


@pytest.mark.parametrize("lanes", [[report(0), report(1, shards=0)]])
def test_lane_that_did_nothing_has_the_same_columns(lanes: list[object]) -> None:
    first, second = speed_rows(replace(RUN, lanes=lanes))
    assert first.keys() == second.keys()
