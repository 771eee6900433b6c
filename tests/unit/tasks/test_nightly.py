"""The inbox, the outcome of each file (with a stand-in for predict), and the nightly report."""

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.nightly import (
    DigestCache,
    FileOutcome,
    FileSnapshot,
    NightlyBatch,
    NightlyReport,
    PredictResult,
    iter_inbox,
    lock_results,
    quarantine_file,
    results_name,
    sample_name,
)
from virnuc_core.errors import DeviceMemoryError, InputError, MismatchError, UsageError
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest

OLD = 1_000_000_000.0


def put(path: Path, content: str = ">a\nACGT\n", modified: float = OLD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (modified, modified))
    return path


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("a.fa", "a"),
        ("a.b.FASTA", "a.b"),
        ("a.fna.gz", "a"),
        ("a.fastq.zst", "a"),
        *[(name, None) for name in ("a.gz", "a.fa.md5", "a.fa.part", "proteins.faa", ".a.fa", "fa")],
    ],
)
def test_sequence_files_are_known_by_their_suffixes(name: str, sample: str | None) -> None:
    assert sample_name(Path(name)) == sample


def test_results_are_named_by_sample_and_hash() -> None:
    assert results_name(Path("in/a.fa.gz"), "0123456789abcdef") == "a-0123456789ab"
    assert len(results_name(Path("ü" * 200 + ".fa"), "0123456789abcdef").encode()) < 255


def test_inbox_is_a_folder_or_a_glob(tmp_path: Path) -> None:
    files = [put(tmp_path / name) for name in ("a.fa", "b.fq.gz")]
    for name in (".c.fa", "notes.txt", "one/rejected/c.fa", "one/c.txt", ".hidden/c.fa", "rejected/e.fa"):
        put(tmp_path / name)
    deep = [put(tmp_path / name) for name in ("one/c.fa", "two/deep/c.fa")]
    (tmp_path / "folder.fa").mkdir()
    (tmp_path / "dangling.fa").symlink_to(tmp_path / "nothing")
    assert [file.path for file in iter_inbox(str(tmp_path))] == files
    assert [file.path for file in iter_inbox(f"{tmp_path}/**/c.*")] == deep
    assert list(iter_inbox(f"{tmp_path}/none/*.fa")) == []
    with pytest.raises(UsageError, match="inbix"):
        list(iter_inbox(str(tmp_path / "inbix")))


def test_file_waits_while_it_is_young_or_changing(tmp_path: Path) -> None:
    settled = FileSnapshot.of(put(tmp_path / "a.fa"))
    assert settled.reason_to_wait(60.0) is None
    young = FileSnapshot.of(put(tmp_path / "b.fa", modified=time.time() - 20))
    assert "written 2" in (young.reason_to_wait(60.0) or "")
    assert young.reason_to_wait(10.0) is None
    future = FileSnapshot.of(put(tmp_path / "c.fa", modified=time.time() + 1e6))
    assert "future" in (future.reason_to_wait(60.0) or "")
    assert future.reason_to_wait(0.0) is None
    put(tmp_path / "a.fa", ">a\nACGTA\n")
    assert "changed" in (settled.reason_to_wait(0.0) or "")
    (tmp_path / "a.fa").unlink()
    assert "not there" in (settled.reason_to_wait(0.0) or "")


def test_rejected_file_replaces_no_other(tmp_path: Path) -> None:
    for number, content in (("1", "one"), ("2", "two")):
        quarantine_file(put(tmp_path / "a.fa", content), number * 64, f"Bad {content}.")
    assert {path.name: path.read_text() for path in (tmp_path / "rejected").iterdir()} == {
        "a.fa": "one",
        "a.fa.reason.txt": "Bad one.\n",
        "222222222222-a.fa": "two",
        "222222222222-a.fa.reason.txt": "Bad two.\n",
    }
    assert not (tmp_path / "a.fa").exists()


def test_digest_is_kept_as_long_as_size_and_time_are_the_same(tmp_path: Path) -> None:
    """Other bytes with the same size and time show that the file is not read again."""
    path, cache = put(tmp_path / "a.fa", "one"), tmp_path / "cache.json"
    with DigestCache(cache) as digests:
        first = digests.sha256(FileSnapshot.of(path))
        digests.sha256(FileSnapshot.of(put(tmp_path / "gone.fa")))
    put(path, "two")
    with DigestCache(cache) as digests:
        assert digests.sha256(FileSnapshot.of(path)) == first
    assert list(json.loads(cache.read_text())["files"]) == [str(path)]
    put(path, "two", modified=OLD + 1)
    assert DigestCache(cache).sha256(FileSnapshot.of(path)) != first


def test_digest_of_a_file_that_changed_meanwhile_is_not_kept(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    file = FileSnapshot.of(put(tmp_path / "a.fa"))
    put(tmp_path / "a.fa", "other bytes")
    with DigestCache(cache) as digests:
        digests.sha256(file)
        (tmp_path / "a.fa").unlink()
        with pytest.raises(InputError, match="does not exist"):
            digests.sha256(file)
    assert not cache.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"files": {"a": 1}}', '{"files": {"a": [1, 2, 3, 4]}}', "\0"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = put(tmp_path / "cache.json", content)
    with caplog.at_level(logging.WARNING), DigestCache(cache) as digests:
        digests.sha256(FileSnapshot.of(put(tmp_path / "a.fa")))
    assert "read again" in caplog.text
    assert list(json.loads(cache.read_text())["files"]) == [str(tmp_path / "a.fa")]


def test_cache_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DigestCache(tmp_path / "no folder" / "cache.json") as digests:
        assert len(digests.sha256(FileSnapshot.of(put(tmp_path / "a.fa")))) == 64
    assert "cannot be written" in caplog.text


class Batches:
    """An inbox and its nightly runs; predict writes its report, or raises the error in the file's content."""

    def __init__(self, root: Path) -> None:
        self.inbox, self.out = root / "inbox", root / "out"
        self.inbox.mkdir()
        self.out.mkdir()
        self.errors: dict[str, BaseException] = {}
        self.meanwhile: Callable[[], object] = lambda: None
        self.calls: list[tuple[str, str]] = []

    def put(self, name: str, content: str, modified: float = OLD) -> Path:
        return put(self.inbox / name, content, modified)

    def predict(self, path: Path, out: Path) -> PredictResult:
        self.calls.append((path.name, out.name))
        content = path.read_text()
        out.mkdir(exist_ok=True)
        sha256 = input_digest(path).sha256
        self.meanwhile()
        error = self.errors.get(content)
        if error is None:
            document = {"inputs": [{"sha256": sha256}], "counts": {"records": 3, "contigs_virus": 2}}
            RunFolder(out).report.write_text(json.dumps(document))
        return PredictResult(error=error, link="http://127.0.0.1/run")

    def outcomes(self) -> dict[str, FileOutcome]:
        with DigestCache(self.out / "digests.json") as digests:
            batch = NightlyBatch(self.out, digests, self.predict, 60.0)
            return {outcome.path.name: outcome for outcome in batch.process(iter_inbox(str(self.inbox)))}

    def statuses(self) -> dict[str, str]:
        return {name: outcome.status for name, outcome in self.outcomes().items()}


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    return Batches(tmp_path)


def test_each_file_is_computed_once(batches: Batches) -> None:
    batches.put("a.fa", "one")
    batches.put("b.fa", "two")
    first = batches.outcomes()
    assert [outcome.status for outcome in first.values()] == ["done", "done"]
    assert (first["a.fa"].contigs, first["a.fa"].contigs_virus) == (3, 2)
    assert first["a.fa"].results == batches.out / f"a-{input_digest(batches.inbox / 'a.fa').sha256[:12]}"
    batches.put("c.fa", "three")
    assert batches.statuses() == {"a.fa": "kept", "b.fa": "kept", "c.fa": "done"}
    assert [name for name, _ in batches.calls] == ["a.fa", "b.fa", "c.fa"]


def test_bytes_count_and_not_names(batches: Batches) -> None:
    batches.put("first.fa", "one")
    batches.put("copy.fasta", "one")
    outcomes = batches.outcomes()
    assert [outcome.status for outcome in outcomes.values()] == ["done", "kept"]
    assert "copy.fasta" in outcomes["first.fa"].reason
    assert len(batches.calls) == 1
    (batches.inbox / "copy.fasta").rename(batches.inbox / "renamed.fa")
    assert batches.statuses() == {"first.fa": "kept", "renamed.fa": "kept"}
    batches.put("first.fa", "other", modified=OLD + 1)
    assert batches.statuses() == {"first.fa": "done", "renamed.fa": "kept"}


def test_bad_file_is_moved_aside_with_its_copies_and_stops_no_other(batches: Batches) -> None:
    batches.errors["bad"] = InputError("a.fa is truncated.")
    for name, content in (("a.fa", "bad"), ("b.fa", "bad"), ("c.fa", "good")):
        batches.put(name, content)
    assert batches.statuses() == {"a.fa": "rejected", "b.fa": "rejected", "c.fa": "done"}
    for name in ("a.fa", "b.fa"):
        assert (batches.inbox / "rejected" / f"{name}.reason.txt").read_text() == "a.fa is truncated.\n"
    assert batches.statuses() == {"c.fa": "kept"}
    assert len(batches.calls) == 2


@pytest.mark.parametrize(
    "error",
    [DeviceMemoryError("no memory"), MismatchError("another preset"), OSError(errno.EIO, "disk")],
    ids=["retryable", "settings", "foreign"],
)
def test_failed_file_is_resumed_by_the_next_run_also_under_another_name(
    batches: Batches, error: Exception
) -> None:
    batches.errors["one"] = error
    batches.put("a.fa", "one")
    batches.put("b.fa", "two")
    outcomes = batches.outcomes()
    assert [outcome.status for outcome in outcomes.values()] == ["failed", "done"]
    assert type(error).__name__ in outcomes["a.fa"].reason
    batches.errors.clear()
    (batches.inbox / "a.fa").rename(batches.inbox / "c.fa")
    assert batches.statuses() == {"b.fa": "kept", "c.fa": "done"}
    assert batches.calls[0][1] == batches.calls[-1][1]
    assert batches.calls[0][1].startswith("a-")


def test_disk_that_cannot_be_read_is_no_fault_of_the_file(batches: Batches) -> None:
    """The reader raises InputError for both; a disk error is its cause."""
    unreadable, damaged = InputError("a.fa cannot be read"), InputError("b.fa cannot be read")
    unreadable.__cause__ = OSError(errno.EIO, os.strerror(errno.EIO))
    damaged.__cause__ = OSError("invalid data stream")
    batches.errors |= {"one": unreadable, "two": damaged}
    batches.put("a.fa", "one")
    batches.put("b.fa", "two")
    assert batches.statuses() == {"a.fa": "failed", "b.fa": "rejected"}


def test_file_that_is_being_written_waits(batches: Batches) -> None:
    batches.put("a.fa", "half", modified=time.time() - 30)
    assert (batches.statuses(), batches.calls) == ({"a.fa": "waiting"}, [])
    # An upload that continues while the file is read is not a bad file.
    batches.errors["half"] = InputError("a.fa is truncated.")
    batches.meanwhile = lambda: batches.put("a.fa", "half and half", modified=OLD + 1)
    batches.put("a.fa", "half")
    assert batches.statuses() == {"a.fa": "waiting"}
    batches.meanwhile = lambda: None
    assert batches.statuses() == {"a.fa": "done"}


def test_results_of_other_bytes_do_not_count(batches: Batches) -> None:
    """The file was replaced after it was hashed, so the run is over the new bytes."""
    path = batches.put("a.fa", "one")
    results = batches.out / f"a-{input_digest(path).sha256[:12]}"
    report = {"inputs": [{"sha256": "0" * 64}], "counts": {"records": 1, "contigs_virus": 1}}
    put(RunFolder(results).report, json.dumps(report))
    assert batches.statuses() == {"a.fa": "done"}
    RunFolder(results).report.write_text("{}")
    assert batches.statuses() == {"a.fa": "done"}
    assert len(batches.calls) == 2


def test_name_that_is_no_text_is_refused_and_stops_no_other(batches: Batches) -> None:
    put(Path(os.fsdecode(os.fsencode(batches.inbox) + b"/probe_\xfc.fa")), "one")
    batches.put("z.fa", "two")
    outcomes = batches.outcomes().values()
    assert {outcome.name: outcome.status for outcome in outcomes} == {
        "probe_\N{REPLACEMENT CHARACTER}.fa": "rejected",
        "z.fa": "done",
    }


def test_bad_file_that_cannot_be_moved_stays_and_fails(batches: Batches) -> None:
    batches.errors["bad"] = InputError("a.fa is truncated.")
    path = batches.put("a.fa", "bad")
    (batches.inbox / "rejected").write_text("in the way")
    outcome = batches.outcomes()["a.fa"]
    assert outcome.status == "failed"
    assert outcome.reason.startswith("a.fa is truncated. It cannot be moved aside")
    assert path.exists()


def test_results_belong_to_one_run_at_a_time(tmp_path: Path) -> None:
    with lock_results(tmp_path / "out") as first, lock_results(tmp_path / "out") as second:
        assert (first, second) == (True, False)
    with lock_results(tmp_path / "out") as third:
        assert third
    with pytest.raises(UsageError, match="cannot be written"), lock_results(put(tmp_path / "file")):
        pass


OUTCOMES = (
    FileOutcome(
        path=Path("in/old.fa"), status="kept", results=Path("out/old-0"), contigs=9, contigs_virus=9
    ),
    FileOutcome(
        path=Path("in/new.fa"), status="done", results=Path("out/new-0"), contigs=5, contigs_virus=2,
        seconds=12.34, link="http://127.0.0.1:4200/runs/flow-run/1",
    ),
    FileOutcome(path=Path("in/page.fa"), status="rejected", reason="it begins with b'<!DOCTYPE html>' | b"),
    FileOutcome(path=Path("in/lost.fa"), status="failed", reason="LaneError: lane 0 died", seconds=1.0),
)  # fmt: skip


def report(*outcomes: FileOutcome) -> NightlyReport:
    return NightlyReport(inbox="in", out=Path("out"), outcomes=outcomes)


def test_report_counts_the_contigs_of_this_run_and_puts_failures_first() -> None:
    whole = report(*OUTCOMES)
    assert whole.summary == "4 files: 1 kept, 1 done, 1 rejected, 1 failed"
    files = {f"files_{status}": 1 for status in ("failed", "rejected", "done", "kept")}
    amounts = {"files_waiting": 0, "contigs": 5, "contigs_virus": 2, "run_seconds": 13.34}
    assert whole.metrics == {**files, **amounts}
    assert [row["file"] for row in whole.rows] == ["lost.fa", "page.fa", "new.fa", "old.fa"]
    assert [row["virus"] for row in whole.rows] == ["", "", 2, 9]


def test_page_links_and_escapes_what_foreign_files_say() -> None:
    page = report(*OUTCOMES).markdown({"mlflow_run_id": "abc"})
    assert "# 4 files: 1 kept, 1 done" in page
    assert "| new.fa | 5 | 2 | 12.3 | [run](http://127.0.0.1:4200/runs/flow-run/1) |" in page
    assert "- mlflow run id: `abc`" in page
    assert "- rejected `page.fa`: it begins with b'&lt;!DOCTYPE html&gt;' \\| b\n" in page
    assert "old.fa" not in page
    assert report().markdown({}).startswith("# no files in the inbox\n")


def test_only_the_first_failures_are_named() -> None:
    failed = [FileOutcome(path=Path(f"{i}.fa"), status="failed", reason="lost") for i in range(5)]
    assert report(*failed).failures == "Failed: 0.fa: lost; 1.fa: lost; 2.fa: lost; and 2 more."
    assert report(*OUTCOMES[:1]).failures == ""
