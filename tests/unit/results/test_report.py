"""The report: the same numbers as the tables, never more than its limits, and nothing that its data could do."""

import json
import re
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.made_reports import EVIDENCE, MadeContig, island, many_contigs, write_run, write_stretches
from virnuc_core.errors import DamagedFileError, InputError
from virnuc_core.results.fdr import SampleCalls
from virnuc_core.results.report import evidence, reading
from virnuc_core.results.report.data import (
    LEVELS,
    MAX_CLASSES,
    NO_SCORE,
    UNLABELLED,
    Limits,
    RunFacts,
    gather,
    histogram,
    quantise,
    read_labels,
)
from virnuc_core.results.report.evidence import NO_CLASS
from virnuc_core.results.report.page import script_json, write_report_page
from virnuc_core.results.report.totals import BINS
from virnuc_core.specs import FrameRule

VIRAL = MadeContig(name="viral", p_virus=(0.9, 0.8, None, 0.7), regions=((1, 2000),), tier="confident")
MADE = [*many_contigs(30), island("island"), MadeContig(name="short", p_virus=(0.7, 0.9)), VIRAL]
REJECTED = [(str(i), f"bad_{i}", "in.fa", "0", "empty sequence" if i % 2 else "not DNA") for i in range(9)]
HOSTILE = "</script><script>alert(1)</script><!--&amp;\u2028'\""


def test_every_number_is_that_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_BATCH_ROWS", 7)
    folder, document = write_run(tmp_path, MADE, rejected=REJECTED)
    found = gather(folder, document)
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
    assert "class" not in columns
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
    genomes = [*columns["genomes"], None]
    nearest = [genomes[-1 if number is None else number] for number in columns["nearest"]]
    assert nearest == table["nearest"].to_pylist()
    assert columns["novelty"] == table["novelty"].to_pylist()
    assert columns["lineage"] == [lineage or "" for lineage in table["lineage"].to_pylist()]
    assert found["totals"]["p_sum"] == pytest.approx(sum(p for p in p_virus.to_pylist() if p is not None))
    assert sum(found["totals"]["histogram"][BINS // 2 :]) == 0
    (tmp_path / "open").mkdir()
    opened = gather(*write_run(tmp_path / "open", MADE))
    assert (opened["call_column"], opened["names"]["predicted"]) == ("mean_p", [])
    assert not {"predicted", "nearest", "novelty"} & set(opened["contigs"])
    no_probability = pa.array([2.5] * len(table))
    table = table.set_column(table.schema.get_field_index("novelty"), "novelty", no_probability)
    pq.write_table(table, folder.contigs_parquet)
    with pytest.raises(DamagedFileError, match="novelty is out of range"):
        gather(folder, document)


def test_the_sample_is_described_in_words_and_numbers(tmp_path: Path) -> None:
    sample = SampleCalls(
        prior=0.5, share=0.125, share_low=0.1, fdr=0.05, threshold=None, expected_fdr=0.0, expected_false=0.0
    )
    for number, threshold in enumerate((0.93, None)):
        root = tmp_path / str(number)
        root.mkdir()
        made = replace(sample, threshold=threshold)
        found = gather(*write_run(root, MADE, frames="longest", sample=made))
        assert found["run"]["sample"] == asdict(made)
        assert found["sample"].startswith("Viruses among the scored contigs: about 12.5 %")
        assert ("called from p_virus 0.93 on" in found["sample"]) == (threshold is not None)
        assert ("no contig can be called for a false discovery rate of at most 5 %" in found["sample"]) == (
            threshold is None
        )


def unpacked(text: str, dtype: str) -> list[float]:
    numbers: list[float] = np.frombuffer(b64decode(text), dtype).tolist()
    return numbers


def test_called_contigs_have_evidence_class_and_stretches_of_each_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BATCH_ROWS", 7)
    monkeypatch.setattr(evidence, "_BLOCK_ROWS", 3)
    classes = (("prokaryotic virus", "eukaryotic virus", None, "plasmid"), ("bacterium", "eukaryotic virus"))
    rows = ((("F3", 2, 90, 0.75), ("R1", 4, 300, 0.2)), (("F1", 0, 33, 0.9),), (), (("R2", 1, 60, 0.1),))
    mixed = MadeContig(
        name="mixed", p_virus=(0.9, 0.8, None, 0.3), chunk_classes=classes[0], stretches=rows, predicted="new"
    )
    short = MadeContig(
        name="short", p_virus=(0.4, 0.9), chunk_classes=classes[1], predicted="eukaryotic virus"
    )
    made = [*many_contigs(5), mixed, island("island"), MadeContig(name="other", p_virus=(0.2,) * 4), short]
    folder, document = write_run(tmp_path, made, frames="longest")
    write_stretches(folder, made)
    found = gather(folder, document)
    why, names = found["evidence"], found["names"]["predicted"]
    called = [contig for contig in made if contig.call == "virus"]
    assert [found["contigs"]["name"][row] for row in why["rows"]] == [one.name for one in called]
    assert {row for row, one in enumerate(made) if one.call == "virus"} <= set(found["tracks"]["rows"])
    p_virus = [p for contig in called for p in contig.p_virus]
    expected = [np.nan if p is None else EVIDENCE * (p - 0.5) for p in p_virus]
    np.testing.assert_allclose(unpacked(why["values"], "<f4"), expected, rtol=1e-6)
    shown = [None if number == NO_CLASS else names[number] for number in unpacked(why["classes"], "u1")]
    table = pq.read_table(folder.predictions_parquet).to_pylist()
    assert shown == [row["class"] for row in table if row["contig"] in {one.name for one in called}]
    viral = {names[number] for number in found["predicted"]["viral"]}
    assert viral == {"prokaryotic virus", "eukaryotic virus", "new"}
    sums = {names[one["class"]]: (one["contigs"], one["bases"]) for one in found["predicted"]["totals"]}
    assert (sums["new"], sums["eukaryotic virus"]) == ((1, 2000), (1, 1000))
    assert sum(number for number, _ in sums.values()) == sum(one.call != "unscored" for one in made)

    own = why["stretches"]
    counts = unpacked(own["counts"], "u1")
    begin = sum(len(one.p_virus) for one in called[: called.index(mixed)])
    assert counts[begin : begin + 4] == [2, 1, 0, 1]
    first = sum(counts[:begin])
    frames, starts, bases, p_virus = (
        unpacked(own[name], dtype)[first : first + 4]
        for name, dtype in (("frames", "u1"), ("starts", "<u4"), ("bases", "<u4"), ("p_virus", "<f4"))
    )
    assert (frames, starts, bases) == ([2, 3, 0, 4], [2, 4, 0, 1], [90, 300, 33, 60])
    assert p_virus == pytest.approx([0.75, 0.2, 0.9, 0.1])

    limits = Limits(evidence=6)
    assert [
        found["contigs"]["name"][row] for row in gather(folder, document, None, limits)["evidence"]["rows"]
    ] == [one.name for one in sorted(called, key=lambda one: -sum(p >= 0.5 for p in one.scored))[:1]]
    write_stretches(folder, [*many_contigs(5), mixed, made[6], short, made[7]])
    with pytest.raises(DamagedFileError, match=rf"{folder.embeddings} has other rows than the tables"):
        gather(folder, document)
    folder.embeddings.unlink()
    assert gather(folder, document)["evidence"]["stretches"] is None
    (tmp_path / "open").mkdir()
    assert not {"evidence", "predicted"} & set(gather(*write_run(tmp_path / "open", made)))


def test_nothing_grows_beyond_its_limit_and_what_matters_most_is_kept(tmp_path: Path) -> None:
    islands = {f"island_{i}" for i in range(5)}
    made = [*many_contigs(30), *map(island, sorted(islands)), MadeContig(name="n" * 900, p_virus=(0.9,) * 50)]
    limits = Limits(
        contigs=10, chunks=250, regions=2, rejected=3, reasons=1, name_letters=50, files=0, lanes=0
    )
    folder, document = write_run(tmp_path, made, rejected=REJECTED)
    found = gather(folder, document, {contig.name: "made" for contig in made}, limits)
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
    assert found["classes"][0]["contigs"] == 36
    assert (found["run"]["inputs"], found["run"]["num_inputs"], found["run"]["num_lanes"]) == ([], 1, 1)


@pytest.mark.parametrize("frames", ["open", "longest"])
@pytest.mark.parametrize("limits", [Limits(), Limits(contigs=3, regions=2)])
def test_rows_read_at_a_time_change_nothing(
    frames: FrameRule, limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [*many_contigs(10), island("a"), VIRAL, island("b"), *many_contigs(4, 2)]
    made = [replace(contig, name=f"{contig.name}_{number}") for number, contig in enumerate(made)]
    made[3] = replace(made[3], regions=((1, 500), (1001, 2000)))
    folder, document = write_run(tmp_path, made, frames=frames)
    labels = {contig.name: f"class {number % 3}" for number, contig in enumerate(made) if number % 4}
    whole = gather(folder, document, labels, limits)
    assert whole["totals"]["regions"] == 5
    for rows in (1, 2, 5):
        monkeypatch.setattr(reading, "_BATCH_ROWS", rows)
        assert gather(folder, document, labels, limits) == whole


def test_classes_add_up_to_all(tmp_path: Path) -> None:
    labels = {"viral": "phage", "contig_1": "bacteria", "contig_2": "bacteria", "elsewhere": "phage"}
    found = gather(*write_run(tmp_path, [*many_contigs(10), VIRAL]), labels)
    classes = {one["class"]: one for one in found["classes"]}
    assert {name: one["contigs"] for name, one in classes.items()} == {
        "bacteria": 2,
        "phage": 1,
        UNLABELLED: 8,
    }
    assert classes["phage"]["calls"] == {"virus": 1}
    assert found["unknown_labels"] == 1
    names = [found["names"]["classes"][number] for number in found["contigs"]["class"]]
    assert names == [labels.get(name, UNLABELLED) for name in found["contigs"]["name"]]


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


def with_last(column: str, value: object) -> Callable[[pa.Table], pa.Table]:
    """Changes a value of the last row."""
    return lambda table: pa.Table.from_pylist(
        [*table.to_pylist()[:-1], {**table.to_pylist()[-1], column: value}], table.schema
    )


def without_first_unscored(table: pa.Table) -> pa.Table:
    rows = table.to_pylist()
    rows.remove(next(row for row in rows if row["p_virus"] is None))
    return pa.Table.from_pylist(rows, table.schema)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("contigs", with_last("mean_p", float("nan")), "mean_p is out of range"),
        ("contigs", with_last("mean_p", 1.5), "mean_p is out of range"),
        ("predictions", with_last("p_virus", -0.1), "p_virus is out of range"),
        ("regions", with_last("score", float("inf")), "score is out of range"),
        ("regions", with_last("contig", "another"), "'another' is no contig of the run"),
        (
            "regions",
            lambda table: table.take([1, 0]),
            "'island' is no contig of the run, or not in its order",
        ),
        ("contigs", lambda table: table.select(["contig"]), "its columns are contig"),
        ("contigs", lambda table: table.slice(1), "and run.json has"),
        ("predictions", without_first_unscored, "chunks of contigs"),
        ("predictions", with_last("p_virus", None), "and run.json has"),
    ],
)
def test_tables_with_other_content_are_refused(
    name: str, change: Callable[[pa.Table], pa.Table], message: str, tmp_path: Path
) -> None:
    folder, document = write_run(tmp_path, MADE)
    path = getattr(folder, f"{name}_parquet")
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(DamagedFileError, match=re.escape(str(path))) as caught:
        gather(folder, document)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["contigs.parquet", "predictions.parquet", "regions.parquet", "rejected.tsv"]
)
def test_missing_and_corrupt_tables_are_refused(name: str, tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE)
    path = folder.root / name
    for content in (None, b"", b"PAR1") if path.suffix == ".parquet" else (None, b"header\nPAR1"):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=re.escape(str(path))):
            gather(folder, document)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("counts",), None, "counts"),
        (("stage_seconds", "index"), float("inf"), "stage_seconds.index"),
        (("links", "mlflow_run_id"), 7, "links.mlflow_run_id"),
        (("lanes",), [{"lane": 0}], "lanes.0.host: Field required"),
    ],
)
def test_an_edited_run_json_is_refused(
    path: tuple[str, ...], value: object, named: str, tmp_path: Path
) -> None:
    folder, document = write_run(tmp_path, [island("one")], links={"mlflow_run_id": "1"})
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(DamagedFileError, match=rf"run\.json cannot be read \({named}"):
        write_report_page(folder, document)


def test_unusual_events_become_warnings(tmp_path: Path) -> None:
    _, document = write_run(tmp_path, [island("one")])
    assert RunFacts.model_validate_json(json.dumps(document)).warnings == []
    document["work"]["models"][0].update(fp32_batches=1, out_of_memory=2)
    document["counts"] |= {"rejected": 3, "contigs_unscored": 1}
    warnings = " ".join(RunFacts.model_validate_json(json.dumps(document)).warnings)
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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\ufeffcontig\tlabel\torganism\r\n# mine\n\na\tvirus\tx\n=1+1 long header\tbacteria\nb\t=cmd\r\na\tvirus\n",
         {"a": "virus", "%3D1+1": "bacteria", "b": "%3Dcmd"}),
        ("a virus\n", "line 1: 'a virus' is not a contig, a tab"),
        ("a\tvirus\nb\t\n", "line 2"),
        ("a\tvirus\na\tother\n", "one class"),
        ("", "has no labels"),
        ("contig\tclass\n", "has no labels"),
        ("a\t\udcff\n", "not UTF-8"),
        ("".join(f"c{i}\tclass {i}\n" for i in range(MAX_CLASSES + 1)), "is the second column the class"),
    ],
)  # fmt: skip
def test_labels(content: str, expected: dict[str, str] | str, tmp_path: Path) -> None:
    table = tmp_path / "labels.tsv"
    table.write_bytes(content.encode(errors="surrogateescape"))
    if isinstance(expected, dict):
        assert read_labels(table) == expected
    else:
        with pytest.raises(InputError, match=expected):
            read_labels(table)
