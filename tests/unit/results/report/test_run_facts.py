"""What is taken from run.json, also from one that somebody has edited."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.made_reports import island, write_run
from virnuc_core.results.report.run_facts import RunFacts


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    _, document = write_run(tmp_path, [island("one")], links={"mlflow_run_id": "1"})
    return document


def test_a_document_from_memory_and_one_from_a_file_say_the_same(document: dict[str, Any]) -> None:
    facts = RunFacts.of_document(document)
    assert RunFacts.of_document(json.loads(json.dumps(document))) == facts
    assert facts.chunk_length == 500
    document["counts"]["more"] = 7
    assert RunFacts.of_document(document) == facts
    assert facts.lanes[0].host == "box"
    assert facts.links == {"mlflow_run_id": "1"}
    assert facts.finished.startswith("2026-01-02")


def test_the_threshold_is_that_of_the_run(document: dict[str, Any]) -> None:
    assert RunFacts.of_document({**document, "threshold": 0.9}).threshold == 0.9
    del document["threshold"]
    assert RunFacts.of_document(document).threshold == 0.5


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("counts",), None, "counts"),
        (("models",), "many", "models"),
        (("stage_seconds", "index"), "long", "stage_seconds.index"),
        (("links", "mlflow_run_id"), 7, "links.mlflow_run_id"),
        (("lanes",), [[]], r"lanes is \[\]"),
        (("lanes",), [{"lane": 0}], "lanes.host is missing"),
        (("throughput",), [], "throughput"),
    ],
)
def test_what_is_of_another_form_is_named(
    document: dict[str, Any], path: tuple[str, ...], value: object, named: str
) -> None:
    *outer, last = path
    place = document
    for name in outer:
        place = place[name]
    place[last] = value
    with pytest.raises(ValueError, match=named):
        RunFacts.of_document(document)


def test_troubles_become_warnings(document: dict[str, Any]) -> None:
    assert RunFacts.of_document(document).warnings == ()
    document["work"]["models"][0].update(fp32_batches=1, out_of_memory=2)
    document["counts"] |= {"rejected": 3, "contigs_unscored": 1}
    warnings = " ".join(RunFacts.of_document(document).warnings)
    for part in ("1 of 2 batches", "parted 2 times", "3 records were not used", "More than half"):
        assert part in warnings
