"""What a person reads of a night."""

from pathlib import Path

from tasks.pages.nightly_page import NightReport, Outcome

OUTCOMES = (
    Outcome(path=Path("in/old.fa"), status="kept", results=Path("out/old-0"), contigs=9, contigs_virus=9),
    Outcome(
        path=Path("in/new.fa"), status="done", results=Path("out/new-0"), contigs=5, contigs_virus=2,
        seconds=12.34, link="http://127.0.0.1:4200/runs/flow-run/1",
    ),
    Outcome(path=Path("in/page.fa"), status="rejected", reason="it begins with b'<!DOCTYPE html>' | b"),
    Outcome(path=Path("in/lost.fa"), status="failed", reason="LaneError: lane 0 died", seconds=1.0),
)  # fmt: skip


def report(*outcomes: Outcome) -> NightReport:
    return NightReport(inbox="in", out=Path("out"), outcomes=outcomes)


def test_counts_only_the_contigs_of_this_night() -> None:
    night = report(*OUTCOMES)
    assert night.summary == "4 files: 1 kept, 1 done, 1 rejected, 1 failed"
    assert night.figures == {
        "files_failed": 1,
        "files_rejected": 1,
        "files_waiting": 0,
        "files_done": 1,
        "files_kept": 1,
        "contigs": 5,
        "contigs_virus": 2,
        "run_seconds": 13.34,
    }


def test_what_needs_a_person_stands_first() -> None:
    rows = report(*OUTCOMES).rows
    assert [row["file"] for row in rows] == ["lost.fa", "page.fa", "new.fa", "old.fa"]
    assert rows[2]["virus"] == 2
    assert rows[0]["virus"] == ""


def test_page_links_and_quotes_what_foreign_files_say() -> None:
    page = report(*OUTCOMES).markdown({"mlflow_run_id": "abc"})
    assert "# 4 files: 1 kept, 1 done" in page
    assert "| new.fa | 5 | 2 | 12.3 | [run](http://127.0.0.1:4200/runs/flow-run/1) |" in page
    assert "- mlflow run id: `abc`" in page
    assert "- rejected `page.fa`: it begins with b'&lt;!DOCTYPE html&gt;' \\| b\n" in page
    assert "old.fa" not in page


def test_empty_night_says_so() -> None:
    assert report().summary == "no files in the inbox"
    assert report().markdown({}).startswith("# no files in the inbox\n")


def test_only_the_first_failures_are_named() -> None:
    failed = [Outcome(path=Path(f"{i}.fa"), status="failed", reason="lost") for i in range(5)]
    assert report(*failed).failures == "Failed: 0.fa: lost; 1.fa: lost; 2.fa: lost; and 2 more."
    assert report(*OUTCOMES[:1]).failures == ""
