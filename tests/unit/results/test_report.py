"""The report: the same numbers as the tables, never more than its limits, and nothing that its data could do."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.made_reports import MadeContig, lysogen, many_contigs, sequence_of, write_run
from virnuc_core.results.report.page import Limits, gather, script_json, write_report_page
from virnuc_core.run_folder import RunFolder

MADE = [*many_contigs(30), lysogen("lysogen"), MadeContig(name="short", scores=(0.7, 0.9))]
REJECTED = [(str(i), f"bad_{i}", "in.fa", "0", "empty sequence" if i % 2 else "not DNA") for i in range(9)]
HOSTILE = "</script><script>alert(1)</script><!--&amp;\u2028'\""


def written(folder: RunFolder, document: dict[str, Any]) -> str:
    write_report_page(folder, document, sequence_of)
    return folder.page.read_text()


def test_every_number_is_that_of_the_tables(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE)
    found = gather(folder, document, sequence_of)
    table = pq.read_table(folder.contigs_parquet).to_pydict()
    columns, names = found["contigs"], found["names"]
    for column, values in table.items():
        numbers = columns[column]
        if column in names:
            numbers = [None if number is None else names[column][number] for number in numbers]
        assert numbers == values, column
    assert columns["gc"][:4] == [None, 50.0, 75.0, 25.0]
    assert (found["total"], found["threshold"]) == (32, 0.93)
    [track] = found["tracks"]
    assert columns["seq_name"][track["contig"]] == "lysogen"
    provirus = {"start": 20_001, "end": 30_000, "virus_score": 0.97, "fdr": 0.02, "confidence": "likely"}
    assert track["proviruses"] == [provirus]
    assert track["start"] == list(range(1, 60_000, 500))
    assert track["score"] == list(lysogen("lysogen").scores)


def test_nothing_grows_beyond_its_limit_and_what_is_most_viral_is_kept(tmp_path: Path) -> None:
    lysogens = [lysogen(f"lysogen_{i}") for i in range(4)]
    made = [*many_contigs(30), *lysogens, MadeContig(name="n" * 900, scores=(0.1,) * 5)]
    folder, document = write_run(tmp_path, made)
    found = gather(folder, document, sequence_of, Limits(contigs=10, cards=3, chunks=250))
    names = found["contigs"]["seq_name"]
    viral = sorted((c for c in made if c.call == "virus"), key=lambda c: -(c.score or 0))
    kept = {contig.name for contig in [*lysogens, *viral[:6]]}
    assert names == [contig.name for contig in made if contig.name in kept]
    assert [len(track["score"]) for track in found["tracks"]] == [120, 120, 0]
    found = gather(folder, document, sequence_of, Limits(name_bytes=600))
    assert 34 > len(found["contigs"]["seq_name"]) > 25
    assert "n" * 900 not in found["contigs"]["seq_name"]


def test_the_headline_tells_confidence_and_expected_false_positives(tmp_path: Path) -> None:
    contigs = [lysogen("a"), MadeContig(name="b", scores=(0.9,), confidence="unsure")]
    page = written(*write_run(tmp_path, contigs))
    assert "<h1>1 viral contig and 1 provirus in 2 contigs <span>1 likely, 1 unsure; expected false" in page
    assert "positives: 1.5 (25.0%)</span>" in page
    page = written(*write_run(tmp_path, [MadeContig(name="b", scores=(0.1,))], frames="open"))
    assert "<h1>0 viral contigs and 0 proviruses in 1 contig <span>false positives cannot be" in page


def test_warnings_and_run_details(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, [lysogen("one")], rejected=REJECTED)
    document["work"]["models"][0].update(fp32_batches=1, out_of_memory=2)
    document["counts"]["contigs_unscored"] = 1
    document["notes"] = ["the models are <small>."]
    document["links"] = {"mlflow": "https://mlflow.example/1?a=1&b=2", "other": "javascript:alert(1)"}
    page = written(folder, document)
    for part in (
        '<p class="warning">1 of 1 contig could not be scored.</p>',
        "9 sequences skipped: see rejected.tsv.",
        "The models are &lt;small&gt;.",
        "5 <bdi>not DNA</bdi>, 4 <bdi>empty sequence</bdi>",
        "1 of 2 batches of tiny were recomputed in fp32, 2 split to fit in memory",
        'href="https://mlflow.example/1?a=1&amp;b=2"',
        "1 × <bdi>NVIDIA Made</bdi>; 2 sequences/s",
        "12.5%",
        "2 January 2026, 03:04 UTC",
    ):
        assert part in page, part
    assert "javascript:" not in page


def test_json_in_a_page_is_json_without_markup() -> None:
    text = script_json({"name": HOSTILE, HOSTILE: [None, 0.5]})
    assert json.loads(text) == {"name": HOSTILE, HOSTILE: [None, 0.5]}
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_a_page_fetches_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    root = tmp_path / "{{data}}<b>{{script}}"
    root.mkdir()
    folder, document = write_run(root, [MadeContig(name=HOSTILE, scores=(0.9,))])
    assert "/models/tiny" in json.dumps(document)
    page = written(folder, document)
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
    [found] = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(found)["contigs"]["seq_name"] == [HOSTILE]
    assert not list(root.glob(".*"))
