"""docs/reliability.md is what the result files give, and these are what the page says of them."""

from collections.abc import Iterator

import pytest

from scripts import render_reliability
from scripts.render_reliability import PAGE, TABLES, Results, read_results

TEXT = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in TABLES)


@pytest.fixture(scope="module")
def results() -> Results:
    return read_results(PAGE.results)


def test_every_table_is_filled(results: Results) -> None:
    page = PAGE.render(TEXT, results)
    assert "old" not in page
    assert PAGE.render(page, results) == page
    assert all(table(results).count("\n") >= 3 for table in TABLES.values())


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.main(["--check"]) == 0


def test_nothing_was_lost_or_changed_in_silence(results: Results) -> None:
    kills, points = results["kills"], results["commit_points"]
    assert kills["kills"] >= 300
    assert kills["identical"] == kills["runs"]
    assert set(points["continued_identical"].values()) == {points["kills"]}
    assert points["with_a_jumping_clock"] == "completed"
    assert points["unsynced_at_the_end"] == []
    assert results["flips"]["flips"] == 1000
    assert results["flips"]["silent"] == 0
    for way in render_reliability.WAYS:
        found = results["os_errors"][way]
        assert found["resumed_identical"] == sum(found["cases"].values())
    assert list(other_bits(results)) == []


def test_hostile_input_was_read_or_refused(results: Results) -> None:
    for name, found in results["fuzz"]["readers"].items():
        assert found["accepted"] + found["refused"] == found["inputs"] == 10_000, name
        assert found["slowest_seconds"] <= 5
        assert found["peak_mb"] < 2048


def test_nothing_grew(results: Results) -> None:
    many, (_, medium, largest) = results["soak"]["soak"], results["soak"]["large"]
    assert many["runs"] == 1000
    assert many["with_other_outputs"] == many["processes_left"] == many["open_files_more"] == 0
    assert many["files_left"] == []
    assert largest["chunks"] == 10 * medium["chunks"] == 5_000_000


def other_bits(results: Results) -> Iterator[str]:
    for name in render_reliability.MATES:
        for case in results[name]["cases"]:
            yield from (way for way, found in case["ways"].items() if found["other"])
