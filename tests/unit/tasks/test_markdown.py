import pytest

from tasks.pages.markdown import cell, code, link, links_of, size, table


def test_foreign_names_are_shown_as_they_are() -> None:
    name = "<b>|a_b*`[x](http://y)\n\\"
    assert cell(name) == r"&lt;b&gt;\|a\_b\*\`\[x\](http://y) \\"
    assert code("a`b\nc") == "`a\u2019b c`"
    assert cell("\x1b[2J\u202eb") == r"%1B\[2J%E2%80%AEb"
    assert code("\x1b[2J\u202eb") == "`%1B[2J%E2%80%AEb`"


def test_only_what_a_browser_can_follow_is_a_link() -> None:
    assert link("http://x/1") == "[http://x/1](http://x/1)"
    assert links_of({"report": "/results/run.json"}) == ["- report: `/results/run.json`"]


def test_table_has_a_rule_below_its_header() -> None:
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
