"""The document of a report: the same numbers as the tables, and never more than its limits."""

import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_reports import MadeContig, island, many_contigs, write_run
from virnuc_core.errors import DamagedFileError
from virnuc_core.results.report.gather import DEFAULT_LIMITS, gather
from virnuc_core.results.report.tracks import NO_SCORE

MADE = [*many_contigs(30), island("island"), MadeContig(name="short", p_virus=(0.7, 0.9))]
REJECTED = [(str(i), f"bad_{i}", "in.fa", "0", "empty sequence" if i % 2 else "not DNA") for i in range(9)]


def test_contigs_are_as_in_the_table_and_in_its_order(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE, rejected=REJECTED)
    found = gather(folder, document).document
    assert json.loads(json.dumps(found, allow_nan=False))["run"]["out"] == str(tmp_path)
    columns = found["contigs"]
    rows = [line.split("\t") for line in folder.contigs.read_text().splitlines()[1:]]
    assert columns["name"] == [row[0] for row in rows]
    for column, i in (("length", 2), ("chunks", 3), ("scored", 4), ("viral", 5)):
        assert columns[column] == [int(row[i]) for row in rows]
    assert columns["mean_p"] == [None if row[7] == "NA" else float(row[7]) for row in rows]
    assert [found["names"]["calls"][call] for call in columns["call"]] == [row[8] for row in rows]
    assert [found["names"]["tiers"][tier] for tier in columns["tier"]] == [row[9] for row in rows]
    assert sum(found["chunk_histogram"]) == document["counts"]["scored_chunks"]
    assert found["rejected"]["reasons"] == {"not DNA": 5, "empty sequence": 4}
    assert "class" not in columns


def test_tracks_and_regions_name_their_contigs(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE)
    found = gather(folder, document).document
    names = found["contigs"]["name"]
    drawn = [names[row] for row in found["tracks"]["rows"]]
    assert drawn == [contig.name for contig in MADE if contig.scored and len(contig.p_virus) > 3]
    levels = b64decode(found["tracks"]["levels"])
    assert len(levels) == sum(found["contigs"]["chunks"][row] for row in found["tracks"]["rows"])
    assert levels[-120 + 2] == NO_SCORE
    assert [names[row] for row in found["regions"]["row"]] == ["island"]
    assert found["regions"]["end"] == [30_000]


def test_nothing_grows_beyond_its_limit(tmp_path: Path) -> None:
    made = [
        *many_contigs(30),
        *(island(f"island_{i}") for i in range(5)),
        MadeContig(name="n" * 900, p_virus=(0.9,) * 50),
    ]
    folder, document = write_run(tmp_path, made, rejected=REJECTED)
    limits = replace(
        DEFAULT_LIMITS,
        contigs=10,
        chunks=250,
        regions=2,
        rejected=3,
        reasons=1,
        name_letters=50,
        files=0,
        lanes=0,
    )
    data = gather(folder, document, {contig.name: "made" for contig in made}, limits)
    found = data.document
    assert len(found["contigs"]["name"]) == 10
    assert found["contigs"]["place"] == sorted(found["contigs"]["place"])
    assert {f"island_{i}" for i in range(5)} < set(found["contigs"]["name"])
    assert max(map(len, found["contigs"]["name"])) == 50
    assert len(b64decode(found["tracks"]["levels"])) <= 250
    assert len(found["regions"]["row"]) == 2
    assert found["rejected"]["total"] == 9
    assert len(found["rejected"]["first"]) == 3
    assert (
        found["rejected"]["reasons"] == {"other reasons": 5, "not DNA": 4}
        or sum(found["rejected"]["reasons"].values()) == 9
    )
    assert found["totals"]["contigs"] == 36, "sums are over all of them"
    assert found["totals"]["regions"] == 5
    assert found["classes"][0]["contigs"] == 36
    assert (found["run"]["inputs"], found["run"]["num_inputs"], found["run"]["num_lanes"]) == ([], 1, 1)


def test_paths_of_models_stay_out(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE)
    assert "/models/tiny" in json.dumps(document)
    assert "/models/tiny" not in json.dumps(gather(folder, document).document)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        ([island("i")], "0 of 1 contig are called viral; 1 other holds a viral region."),
        (
            [MadeContig(name="v", p_virus=(0.9,)), MadeContig(name="u", p_virus=(None,))],
            "1 of 2 contigs is called viral; 1 has no score.",
        ),
        (
            [MadeContig(name="v", p_virus=(0.9,)), MadeContig(name="w", p_virus=(0.8,))],
            "2 of 2 contigs are called viral.",
        ),
    ],
)
def test_the_verdict_is_one_sentence(made: list[MadeContig], verdict: str, tmp_path: Path) -> None:
    assert gather(*write_run(tmp_path, made)).verdict == verdict


def test_tables_of_another_run_are_refused(tmp_path: Path) -> None:
    folder, document = write_run(tmp_path, MADE)
    document["counts"]["records"] += 1
    with pytest.raises(DamagedFileError, match=r"contigs\.tsv .*32 contigs, and run\.json has 33"):
        gather(folder, document)
    document["counts"]["records"] -= 1
    document["counts"]["scored_chunks"] += 1
    with pytest.raises(DamagedFileError, match=r"predictions\.tsv"):
        gather(folder, document)
    del document["models"]
    with pytest.raises(DamagedFileError, match=r"run\.json cannot be read \(models"):
        gather(folder, document)
