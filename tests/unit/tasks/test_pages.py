"""Pages of runs, and plots of heads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks import publishing
from tasks.pages.markdown import cell, code, size
from tasks.pages.plots import roc_figure
from tests.made_lanes import counters, report
from tests.made_plans import PLAN, model
from virnuc_core.results.run_json import RunReport
from virnuc_core.training.metrics import KnownCalls, measure


def test_foreign_names_are_shown_as_they_are() -> None:
    name = "<b>|a_b*`[x](http://y)\n\\"
    assert cell(name) == r"&lt;b&gt;\|a\_b\*\`\[x\](http://y) \\"
    assert code("a`b\nc") == "`a\u2019b c`"
    assert cell("\x1b[2J\u202eb") == r"%1B\[2J%E2%80%AEb"
    assert code("\x1b[2J\u202eb") == "`%1B[2J%E2%80%AEb`"


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


def test_page_says_what_was_found_with_what_and_where_each_lane_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = [replace(report(0), journal="lane-0000-a"), report(1, shards=0)]
    run = RunReport(
        plan=replace(PLAN, models=(model("esm2", name="my_model"),)),
        out="/results/sample",
        counts=None,
        work=counters(20),
        lanes=lanes,
        seconds={"index": 1.0, "embed": 12.0},
        links={},
    )
    pages, tables = dict[str, str](), dict[str, list[dict[str, object]]]()
    monkeypatch.setattr(publishing, "in_flow", lambda: True)
    monkeypatch.setattr(publishing, "show_markdown", lambda key, text, _: pages.update({key: text}))
    monkeypatch.setattr(publishing, "show_table", lambda key, rows, _: tables.update({key: rows}))
    publishing.show_run(tmp_path, run)
    page = pages["virnuc-summary"]
    assert page.startswith("# 20 sequences embedded (0 of 2 shards reused), 2 sequences/s")
    assert r"| ESM-2 my\_model | 8 | fp32, packed engine, sdpa attention | 50.0% | `aaaaaaaaaaaa` |" in page
    assert "- results: /results/sample\n" in page
    lane, idle = tables["virnuc-lanes"]
    assert (lane["log"], idle["log"]) == (f"{tmp_path}/lanes/lane-0000-a.log", "")
    assert (lane["device_name"], lane["load_seconds"]) == ("NVIDIA Made", 2.0)


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
