"""The report: the same numbers as the tables, never more than its limits, and nothing that its data could do."""

import json
import re
from base64 import b64decode, b64encode
from collections import Counter
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.made_reports import MadeContig, island, many_contigs, write_run
from tests.unit.results.test_run_json import SAMPLE
from virnuc_core.results.report.page import (
    LEVELS,
    NO_SCORE,
    Limits,
    gather,
    quantise,
    script_json,
    write_report_page,
)
from virnuc_core.results.report.reading import BINS, histogram
from virnuc_core.specs import FrameRule

VIRAL = MadeContig(name="viral", p_virus=(0.9, 0.8, None, 0.7), regions=((1, 2000),), tier="confident")
MADE = [*many_contigs(30), island("island"), MadeContig(name="short", p_virus=(0.7, 0.9)), VIRAL]
REJECTED = [(str(i), f"bad_{i}", "in.fa", "0", "empty sequence" if i % 2 else "not DNA") for i in range(9)]
HOSTILE = "</script><script>alert(1)</script><!--&amp;\u2028'\""


def test_every_number_is_that_of_the_tables(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE, rejected=REJECTED)
    found = gather(folder, document, Limits(batch_rows=7))
    columns, names = found["contigs"], found["names"]
    table = pq.read_table(folder.contigs_parquet).to_pydict()
    for column, source in {
        **{name: name for name in ("length", "chunks", "mean_p")},
        **{
            "name": "contig",
            "scored": "scored_chunks",
            "viral": "viral_chunks",
        },
    }.items():
        assert columns[column] == table[source]
    assert [names["calls"][call] for call in columns["call"]] == table["call"]
    assert [names["tiers"][tier] for tier in columns["tier"]] == [tier or "NA" for tier in table["tier"]]
    assert sum(found["chunk_histogram"]) == document["counts"]["scored_chunks"]
    assert found["rejected"]["reasons"] == {"not DNA": 5, "empty sequence": 4}
    assert found["rejected"]["first"] == [list(row) for row in REJECTED]

    totals, calls = found["totals"], Counter(contig.call for contig in MADE)
    assert totals["calls"] == calls
    assert (totals["contigs"], totals["bases"]) == (len(MADE), sum(contig.bases for contig in MADE))
    assert sum(totals["tiers"].values()) == calls["virus"]
    assert sum(totals["histogram"]) == len(MADE) - calls["unscored"]
    assert (totals["regions"], totals["region_bases"]) == (2, 20 * 500 + 2000)
    islands = totals["island_contigs"], totals["hosts"]
    assert islands == (1, 1), "a contig that is viral throughout is no island"

    called = f"{calls['virus']} of 33 contigs are called viral"
    assert found["headline"] == f"{called}; 1 other has a viral region; {calls['unscored']} have no score."

    drawn = [contig for contig in MADE if contig.scored and len(contig.p_virus) > 3]
    assert [columns["name"][row] for row in found["tracks"]["rows"]] == [contig.name for contig in drawn]
    scores = np.array([p for contig in drawn for p in contig.p_virus], np.float64)
    assert b64decode(found["tracks"]["levels"]) == quantise(scores).tobytes()
    assert [columns["name"][row] for row in found["regions"]["row"]] == ["island", "viral"]
    assert found["regions"]["end"] == [30_000, 2_000]


def test_a_run_over_the_longest_stretches_shows_the_score_and_class_of_its_contigs(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE, frames="longest")
    # Not the mean of its chunks.
    table = pq.read_table(folder.contigs_parquet)
    p_virus = pa.array([None if p is None else p / 2 for p in table["p_virus"].to_pylist()], pa.float64())
    place = table.schema.get_field_index("p_virus")
    pq.write_table(table.set_column(place, "p_virus", p_virus), folder.contigs_parquet)
    found = gather(folder, document)
    columns = found["contigs"]
    assert found["call_column"] == "p_virus"
    assert columns["p_virus"] == p_virus.to_pylist()
    assert "mean_p" not in columns
    assert (found["sample"], found["run"]["sample"]) == ("", None)
    names = [*found["names"]["predicted"], None]
    assert [names[-1 if number is None else number] for number in columns["predicted"]] == table[
        "class"
    ].to_pylist()
    assert columns["novelty"] == table["novelty"].to_pylist()
    sums = {found["names"]["predicted"][one["class"]]: one for one in found["predicted"]}
    assert [sums[name]["is_virus"] for name in ("prokaryotic virus", "bacterium")] == [True, False]
    assert sum(one["contigs"] for one in sums.values()) == sum(bool(contig.scored) for contig in MADE)
    assert sum(one["bases"] for one in sums.values()) == sum(contig.bases for contig in MADE if contig.scored)
    assert found["totals"]["p_sum"] == pytest.approx(sum(p for p in p_virus.to_pylist() if p is not None))
    assert sum(found["totals"]["histogram"][BINS // 2 :]) == 0
    (tmp_path / "open").mkdir()
    opened = gather(*write_run(tmp_path / "open", MADE))
    assert (opened["call_column"], opened["names"]["predicted"]) == ("mean_p", [])
    assert not {"predicted", "novelty"} & set(opened["contigs"])


@pytest.mark.parametrize(
    ("threshold", "words"),
    [
        (0.93, "called from p_virus 0.93 on"),
        (None, "no contig can be called for a false discovery rate of at most 5 %"),
    ],
)
def test_the_sample_is_described_in_words_and_numbers(
    threshold: float | None, words: str, tmp_path: Path
) -> None:
    sample = replace(SAMPLE, threshold=threshold)
    found = gather(*write_run(tmp_path, MADE, frames="longest", sample=sample))
    assert found["run"]["sample"] == asdict(sample)
    assert words in found["sample"]


def test_nothing_grows_beyond_its_limit_and_what_matters_most_is_kept(tmp_path: Path) -> None:
    islands = {f"island_{i}" for i in range(5)}
    made = [*many_contigs(30), *map(island, sorted(islands)), MadeContig(name="n" * 900, p_virus=(0.9,) * 50)]
    limits = Limits(
        contigs=10, chunks=250, regions=2, rejected=3, reasons=1, name_letters=50, files=0, lanes=0
    )
    folder, document = write_run(tmp_path, made, rejected=REJECTED)
    found = gather(folder, document, limits)
    columns = found["contigs"]
    assert len(columns["name"]) == 10
    assert columns["place"] == sorted(columns["place"])
    assert islands < set(columns["name"])
    assert max(map(len, columns["name"])) == 50
    assert all(columns["call"][row] == 0 or columns["name"][row] in islands for row in range(10))
    assert len(b64decode(found["tracks"]["levels"])) == 50 + 120 + 4 * 5
    assert len(found["regions"]["row"]) == 2
    assert len(found["rejected"]["first"]) == 3
    assert found["rejected"]["reasons"] == {"not DNA": 5, "other reasons": 4}
    assert found["rejected"]["total"] == 9
    assert (found["totals"]["contigs"], found["totals"]["regions"]) == (36, 5), "sums are over all of them"
    assert (found["run"]["inputs"], found["run"]["num_inputs"], found["run"]["num_lanes"]) == ([], 1, 1)


@pytest.mark.parametrize("frames", ["open", "longest"])
@pytest.mark.parametrize("limits", [Limits(), Limits(contigs=3, regions=2)])
def test_rows_read_at_a_time_change_nothing(frames: FrameRule, limits: Limits, tmp_path: Path) -> None:
    made = [*many_contigs(10), island("a"), VIRAL, island("b"), *many_contigs(4, 2)]
    made = [replace(contig, name=f"{contig.name}_{number}") for number, contig in enumerate(made)]
    made[3] = replace(made[3], regions=((1, 500), (1001, 2000)))
    folder, document = write_run(tmp_path, made, frames=frames)
    whole = gather(folder, document, limits)
    assert whole["totals"]["regions"] == 5
    for rows in (1, 2, 5):
        assert gather(folder, document, replace(limits, batch_rows=rows)) == whole


def test_levels_and_bins_of_probabilities() -> None:
    p_virus = np.concatenate([np.linspace(0, 1, 100_001), [0.5, np.nextafter(0.5, 0)]])
    levels = quantise(p_virus)
    again = np.minimum(1, (levels + 0.5) / LEVELS)
    assert np.abs(again - p_virus).max() <= 0.5 / LEVELS + 1e-12
    assert ((again >= 0.5) == (p_virus >= 0.5)).all()
    assert levels.max() == LEVELS < NO_SCORE
    assert quantise(np.array([np.nan, 0.0])).tolist() == [NO_SCORE, 0]
    counts = histogram(np.array([0.0, 0.02, 0.0199, 0.5, 0.58, 1.0, np.nan]))
    assert len(counts) == BINS
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {0: 2, 1: 1, 25: 1, 29: 1, 49: 1}


def test_unusual_events_become_warnings(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, [island("one")])
    assert gather(folder, document)["run"]["warnings"] == []
    document["work"]["models"][0].update(fp32_batches=1, out_of_memory=2)
    document["counts"] |= {"rejected": 3, "contigs_unscored": 1}
    warnings = " ".join(gather(folder, document)["run"]["warnings"])
    for part in ("1 of 2 batches", "split 2 times", "3 records were not used", "More than half"):
        assert part in warnings


def test_json_in_a_page_is_json_without_markup() -> None:
    text = script_json({"name": HOSTILE, HOSTILE: [None, 0.5]})
    assert json.loads(text) == {"name": HOSTILE, HOSTILE: [None, 0.5]}
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_a_page_fetches_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    root = tmp_path / "{{data}}<b>{{script}}"
    root.mkdir()
    folder, document = write_run(root, [MadeContig(name=HOSTILE, p_virus=(0.9,))])
    assert "/models/tiny" in json.dumps(document)
    write_report_page(folder, document)
    page = folder.page.read_text()
    fetched = r"https?://|//\w+\.|@import|\burl\(|\bsrc=|<link|<iframe|innerHTML|\beval\("
    assert re.findall(fetched, page) == []
    assert "/models/tiny" not in page, "paths of the machine stay out"
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        [source] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"{directive} 'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'" in policy
    assert page.count("<script") == 2
    assert "<title>{{data}}&lt;b&gt;{{script}}: virnuc report</title>" in page
    assert "<h1>1 of 1 contig is called viral.</h1>" in page
    [found] = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(found)["contigs"]["name"] == [HOSTILE]
    assert not list(root.glob(".*"))
