"""The catalogue's numbers, against measured and published ones."""

import json
from pathlib import Path

import pytest

from virnuc_core.inference.device import needed_bytes
from virnuc_core.inference.model_facts import head_facts, measured_speeds, model_facts
from virnuc_core.models.catalogue import BUNDLED_HEADS, find_entries

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_parameters_are_those_that_the_models_are_named_for() -> None:
    counts = {facts.entry.name: facts.num_parameters for facts in model_facts() if facts.entry.name != "tiny"}
    named = {"8M": 8e6, "35M": 35e6, "150M": 150e6, "650M": 650e6, "3B": 3e9, "15B": 15e9, "DNABERT-S": 117e6}
    for name, wanted in named.items():
        assert counts[name] == pytest.approx(wanted, rel=0.08), name


@pytest.mark.parametrize("result", ["forward_3B", "forward_650M", "end_to_end_8M", "forward_dnabert_s"])
def test_memory_is_about_what_was_measured(result: str) -> None:
    for case in json.loads((RESULTS / f"{result}.json").read_text())["cases"]:
        [entry] = find_entries(case["model"].removeprefix("random:"), case["family"])
        needed = needed_bytes(entry.spec, case["precision"], case["token_budget"])
        # DNABERT-S's gated feed-forward needs less than three full buffers.
        least = 0.9 if case["family"] == "esm2" else 0.6
        assert least <= case["peak_memory_bytes"] / needed <= 1.1, case["precision"]


def test_speeds_are_those_that_were_measured() -> None:
    for speed in measured_speeds():
        assert (RESULTS / f"{speed.result}.json").is_file()
        assert speed.machine
    by_name = {facts.entry.qualified_name: facts for facts in model_facts()}
    assert by_name["esm2:15B"].speeds == ()
    assert by_name["esm2:3B"].document["speeds"][0]["machine"] == "NVIDIA H200"


def test_bundled_models_and_heads_are_here() -> None:
    tiny = [facts for facts in model_facts() if facts.entry.name == "tiny"]
    assert [facts.here for facts in tiny] == ["bundled", "bundled"]
    assert all(facts.disk_bytes > 1e6 for facts in tiny)
    assert [facts.name for facts in head_facts()] == list(BUNDLED_HEADS)
