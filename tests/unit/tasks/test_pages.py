"""Pages and plots of runs and heads."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from tasks.pages.markdown import cell, code, link, links_of, size, table
from tasks.pages.plots import (
    roc_figure,
    run_figures,
    score_figure,
    throughput_figure,
)
from tasks.pages.run_page import packing_rows, run_page, speed_rows, verdict
from tests.made_lanes import counters, report
from tests.made_models import MadeRun
from tests.made_plans import PLAN, model
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.sample import SampleCalls
from virnuc_core.results.tables import TableCounts
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import InputFile
from virnuc_core.training.metrics import KnownCalls, measure


def test_foreign_names_are_shown_as_they_are() -> None:
    name = "<b>|a_b*`[x](http://y)\n\\"
    assert cell(name) == r"&lt;b&gt;\|a\_b\*\`\[x\](http://y) \\"
    assert code("a`b\nc") == "`a\u2019b c`"
    assert cell("\x1b[2J\u202eb") == r"%1B\[2J%E2%80%AEb"
    assert code("\x1b[2J\u202eb") == "`%1B[2J%E2%80%AEb`"


def test_only_what_a_browser_can_follow_is_a_link_and_a_table_has_a_rule() -> None:
    assert link("http://x/1") == "[http://x/1](http://x/1)"
    assert links_of({"report": "/results/run.json"}) == ["- report: `/results/run.json`"]
    assert table(("a", "b"), [("1", "2")]) == ["| a | b |", "| --- | --: |", "| 1 | 2 |"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 kB"),
        (31_971, "32 kB"),
        (999_400, "999 kB"),
        (12_300_000, "12.3 MB"),
        (7_000_000_000, "7 GB"),
        (5_000_000_000_000_000, "5,000 TB"),
    ],
)
def test_size_is_in_a_unit_that_suits_it(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


COUNTS = TableCounts(
    records=1800, rejected=3, chunks=5000, scored_chunks=4000, frames=7000, short_contigs=0, proviruses=30,
    contigs_virus=480, contigs_provirus=20, contigs_nonviral=1200, contigs_unscored=100, sample=None,
)  # fmt: skip
SAMPLE = SampleCalls(share=0.3, threshold=0.5, expected_fdr=0.025, expected_false=12.5)
RUN = RunReport(
    plan=replace(PLAN, models=(model("esm2", name="my_model"),)),
    out="/results/sample",
    counts=COUNTS,
    work=counters(20),
    lanes=[report()],
    seconds={"index": 1.0, "embed": 12.0},
    links={},
)
MANY_INPUTS = tuple(InputFile(name=f"<{i}>|.fa", size=1_000_000, sha256="") for i in range(5))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (RUN, "# 480 of 1,800 contigs are viral, 30 proviruses\n"),
        (RUN, "| 480 | 20 | 1,200 | 100 | 1,800 |"),
        (RUN, "3 records cannot be used"),
        (
            replace(RUN, counts=replace(COUNTS, sample=SAMPLE)),
            "Expected false positives: 12.5 (2.5%).\n",
        ),
        (RUN, r"| ESM-2 my\_model | 8 | fp32, packed engine, sdpa attention | 50.0% | `aaaaaaaaaaaa` |"),
        (RUN, "2 of 2 shards computed in 1 lane: **2 sequences/s**, 200 residues/s, 13 s in all."),
        (RUN, "- results: `/results/sample`"),
        (RUN, "- MLflow: [http://mlflow/1](http://mlflow/1)"),
        (
            replace(RUN, plan=replace(RUN.plan, inputs=MANY_INPUTS)),
            r"Input: **&lt;0&gt;\|.fa**, **&lt;1&gt;\|.fa**, **&lt;2&gt;\|.fa** and 2 more (5 MB)",
        ),
        (replace(RUN, lanes=[]), "All 2 shards were there from before"),
        (
            replace(RUN, lanes=[report(shards=1)]),
            "1 of 2 shards computed in 1 lane (1 were there from before)",
        ),
        (replace(RUN, counts=None), "# 20 sequences embedded\n\nInput: **in.fa** (0.01 kB)\n\n| model |"),
    ],
)
def test_page_says_what_was_found_with_what_and_how_fast(run: RunReport, said: str) -> None:
    assert said in run_page(run, {"report": "/results/sample/run.json", "MLflow": "http://mlflow/1"})
    assert verdict(run) in said or not said.startswith("#")


def test_tables_have_a_row_a_lane_and_a_row_a_model() -> None:
    folder, local = RunFolder(Path("/data/run")), [report(0), report(1, shards=0)]
    pooled = [replace(lane, journal=f"lane-000{lane.lane}-a") for lane in local]
    lane, idle = speed_rows(replace(RUN, lanes=pooled), folder)
    assert all("log" not in row for row in speed_rows(replace(RUN, lanes=local), folder))
    assert lane["log"] == "/data/run/lanes/lane-0000-a.log"
    assert lane.keys() == idle.keys()
    assert (lane["hardware"], lane["ESM-2 tokens/s"], lane["load s"]) == ("NVIDIA Made (cuda:0)", 200.0, 2.0)
    (packing,) = packing_rows(RUN)
    assert (packing["packing efficiency"], packing["batches"]) == ("50.0%", 2)


def drawn_size(figure: Figure) -> tuple[int, int]:
    """Width and height in pixels of the saved image."""
    figure.savefig(picture := io.BytesIO())
    return Image.open(picture).size


def test_the_bars_of_scores() -> None:
    counts = [0] * 50
    counts[0], counts[24], counts[25], counts[49] = 1, 1, 1, 2
    figure = score_figure(counts)
    (axes,) = figure.axes
    assert [round(bar.get_height()) for bar in axes.patches] == counts
    assert [round(bar.get_x(), 2) for bar in axes.patches][:3] == [0.0, 0.02, 0.04]
    assert drawn_size(figure) == (960, 540)


def test_every_scored_chunk_is_counted(finished_run: MadeRun) -> None:
    table = pd.read_csv(finished_run.folder.chunks, sep="\t")
    scored = table.virus_score.dropna()
    figure = dict(run_figures(finished_run.folder))["virus_score"]
    counts = [round(bar.get_height()) for bar in figure.axes[0].patches]
    assert sum(counts) == len(scored) < len(table)
    assert sum(counts[25:]) == (scored >= 0.5).sum()


@pytest.mark.parametrize(("seconds", "unit"), [(60.0, "seconds"), (600.0, "minutes")])
def test_lanes_are_lines_over_the_time_of_the_run(seconds: float, unit: str) -> None:
    lanes = [("a", [(1000.0, 5.0), (1000.0 + seconds, 7.0)]), ("b", [(1030.0, 6.0)])]
    (axes,) = throughput_figure(lanes).axes
    assert axes.get_xlabel() == unit
    assert axes.lines[0].get_xydata().tolist() == [[0.0, 5.0], [60.0 if unit == "seconds" else 10.0, 7.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    (axes,) = throughput_figure(lanes * 6).axes
    assert (len(axes.lines), axes.get_legend()) == (12, None)


def test_a_level_with_one_class_alone_has_no_line() -> None:
    p = np.linspace(0, 1, 90)
    chunks = KnownCalls(
        is_viral=(np.arange(90) % 3 > 0) & (p > 0.3),
        p_virus=p,
        classes=np.zeros(90, np.int64),
        class_names=("viral",),
        lengths=np.full(90, 500),
    )
    calls = {"chunks": chunks, "contigs": chunks.take(chunks.is_viral)}
    (axes,) = roc_figure(calls).axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == [f"chunks: AUROC {measure(chunks).auroc:.3f}", "chance"]
