"""The inbox, the outcome of each file (with a stand-in for predict), and the nightly report."""

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.nightly import (
    Computed,
    DigestCache,
    FileOutcome,
    FileSnapshot,
    NewFile,
    NightlyBatch,
    NightlyReport,
    claim_results,
    iter_inbox,
    quarantine_file,
    results_name,
    sample_name,
)
from virnuc_core.errors import (
    DeviceMemoryError,
    InputError,
    MismatchError,
    UnreadableInputError,
    UsageError,
)
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
    young = FileSnapshot.of(put(tmp_path / "b.fa", modified=time.time() - 20))
    future = FileSnapshot.of(put(tmp_path / "c.fa", modified=time.time() + 1e6))
    assert settled.reason_to_wait(60.0) is young.reason_to_wait(10.0) is future.reason_to_wait(0.0) is None
    assert "written 2" in (young.reason_to_wait(60.0) or "")
    assert "future" in (future.reason_to_wait(60.0) or "")
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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *(
            (text, "read again")
            for text in ("", "[]", '{"files": {"a": 1}}', '{"files": {"a": [1, 2]}}', "\0")
        ),
        (None, "cannot be written"),
    ],
)
def test_cache_that_cannot_be_used_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None, said: str
) -> None:
    cache = (
        tmp_path / "no folder" / "cache.json" if content is None else put(tmp_path / "cache.json", content)
    )
    with caplog.at_level(logging.WARNING), DigestCache(cache) as digests:
        assert len(digests.sha256(FileSnapshot.of(put(tmp_path / "a.fa")))) == 64
    assert said in caplog.text
    assert content is None or list(json.loads(cache.read_text())["files"]) == [str(tmp_path / "a.fa")]


def put_report(results: Path, sha256: str) -> None:
    document = {"inputs": [{"sha256": sha256}], "counts": {"records": 3, "contigs_virus": 2}}
    put(RunFolder(results).report, json.dumps(document))


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

    def compute(self, files: Iterator[NewFile]) -> Iterator[tuple[NewFile, Computed]]:
        """All at once; the last file ends first."""
        for file in reversed(list(files)):
            yield file, self.predict(file)

    def predict(self, file: NewFile) -> Computed:
        self.calls.append((file.path.name, file.results.name))
        content = file.path.read_text()
        sha256 = input_digest(file.path).sha256
        file.results.mkdir(exist_ok=True)
        self.meanwhile()
        error = self.errors.get(content)
        if error is None:
            put_report(file.results, sha256)
        return Computed(error=error, link="http://127.0.0.1/run")

    def outcomes(self) -> dict[str, FileOutcome]:
        return {outcome.path.name: outcome for outcome in self.night().outcomes}

    def night(self) -> NightlyReport:
        with DigestCache(self.out / "digests.json") as digests:
            batch = NightlyBatch(self.out, digests, self.compute, 60.0)
            outcomes = batch.process(list(iter_inbox(str(self.inbox))))
            return NightlyReport(inbox=str(self.inbox), out=self.out, outcomes=outcomes)

    def statuses(self) -> dict[str, str]:
        return {name: outcome.status for name, outcome in self.outcomes().items()}


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    return Batches(tmp_path)


def test_bytes_count_and_not_names(batches: Batches) -> None:
    path = batches.put("first.fa", "one")
    batches.put("copy.fasta", "one")
    outcomes = batches.outcomes()
    assert [outcome.status for outcome in outcomes.values()] == ["done", "kept"]
    first = outcomes["first.fa"]
    assert "copy.fasta" in first.reason
    assert (first.contigs, first.contigs_virus) == (3, 2)
    assert first.results == batches.out / f"copy-{input_digest(path).sha256[:12]}"
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
    [before, after] = [results for name, results in batches.calls if name in ("a.fa", "c.fa")]
    assert before == after
    assert before.startswith("a-")


def test_disk_that_cannot_be_read_is_no_fault_of_the_file(batches: Batches) -> None:
    batches.errors |= {"one": UnreadableInputError("cannot be read"), "two": InputError("cannot be read")}
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


def test_a_copy_is_computed_when_the_first_file_changes_meanwhile(batches: Batches) -> None:
    batches.put("a.fa", "one")
    batches.put("b.fa", "one")
    batches.errors["one"] = DeviceMemoryError("no memory")

    def change() -> None:
        batches.put("a.fa", "other")
        batches.meanwhile = batches.errors.clear

    batches.meanwhile = change
    assert batches.statuses() == {"a.fa": "waiting", "b.fa": "done"}


def test_results_of_other_bytes_do_not_count(batches: Batches) -> None:
    """The file was replaced after it was hashed, so the run is over the new bytes."""
    path = batches.put("a.fa", "one")
    results = batches.out / f"a-{input_digest(path).sha256[:12]}"
    report = {"inputs": [{"sha256": "0" * 64}], "counts": {"records": 1, "contigs_virus": 1}}
    for text in (json.dumps(report), "{}"):
        put(RunFolder(results).report, text)
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


def test_work_of_another_nightly_run_is_kept_and_said(batches: Batches) -> None:
    path = batches.put("a.fa", "one")

    def share(files: Iterator[NewFile]) -> Iterator[tuple[NewFile, Computed]]:
        for file in files:  # computed under the name of a copy
            put_report(batches.out / f"copy-{file.sha256[:12]}", file.sha256)
            yield file, Computed(is_own=False, seconds=5.0)

    batches.compute = share  # type: ignore[method-assign]
    night = batches.night()
    assert night.summary == "1 files: 1 kept; another nightly run computed 1 of them"
    [outcome] = night.outcomes
    assert outcome.results == batches.out / f"copy-{input_digest(path).sha256[:12]}"
    assert night.metrics["run_seconds"] == 0


def test_bad_file_is_moved_aside_by_one_of_two_nightly_runs(batches: Batches) -> None:
    path = batches.put("a.fa", "bad")
    batches.errors["bad"] = InputError("a.fa is truncated.")
    batches.meanwhile = lambda: quarantine_file(path, "1" * 64, "a.fa is truncated.")
    assert batches.statuses() == {"a.fa": "waiting"}
    with pytest.raises(FileNotFoundError):
        quarantine_file(path, "1" * 64, "a.fa is truncated.")
    rejected = {path.name for path in (batches.inbox / "rejected").iterdir()}
    assert rejected == {"a.fa", "a.fa.reason.txt"}


def test_results_are_claimed_by_one_nightly_run_at_a_time(tmp_path: Path) -> None:
    with claim_results(tmp_path / "out") as first, claim_results(tmp_path / "out") as second:
        assert (first, second) == (True, False)
    with claim_results(tmp_path / "out", wait=True) as third:
        assert third
    with pytest.raises(UsageError, match="cannot be written"), claim_results(put(tmp_path / "file")):
        pass


KEPT = FileOutcome(path=Path("in/old.fa"), status="kept", contigs=9, contigs_virus=9)
DONE = FileOutcome(
    path=Path("in/new.fa"), status="done", contigs=5, contigs_virus=2, seconds=12.34, link="http://runs/1"
)
REJECTED = FileOutcome(path=Path("in/page.fa"), status="rejected", reason="it begins with b'<html>' | b")
LOST = FileOutcome(path=Path("in/lost.fa"), status="failed", reason="LaneError: lane 0 died", seconds=1.0)


def report(*outcomes: FileOutcome) -> NightlyReport:
    return NightlyReport(inbox="in", out=Path("out"), outcomes=outcomes)


def test_report_counts_the_contigs_of_this_run_puts_failures_first_and_escapes_foreign_text() -> None:
    whole = report(KEPT, DONE, REJECTED, LOST)
    assert whole.summary == "4 files: 1 kept, 1 done, 1 rejected, 1 failed"
    files = {f"files_{status}": 1 for status in ("failed", "rejected", "done", "kept")}
    amounts = {"files_waiting": 0, "contigs": 5, "contigs_virus": 2, "run_seconds": 13.34}
    assert whole.metrics == {**files, **amounts}
    assert [row["file"] for row in whole.rows] == ["lost.fa", "page.fa", "new.fa", "old.fa"]
    assert [row["virus"] for row in whole.rows] == ["", "", 2, 9]
    page = whole.markdown
    assert f"# {whole.summary}\n" in page
    assert "| new.fa | 5 | 2 | 12.3 | [run](http://runs/1) |" in page
    assert "- rejected `page.fa`: it begins with b'&lt;html&gt;' \\| b\n" in page
    assert "old.fa" not in page
    assert report().markdown.startswith("# no files in the inbox\n")


def test_only_the_first_failures_are_named() -> None:
    failed = [FileOutcome(path=Path(f"{i}.fa"), status="failed", reason="lost") for i in range(5)]
    assert report(*failed).failures == "Failed: 0.fa: lost; 1.fa: lost; 2.fa: lost; and 2 more."
    assert report(KEPT).failures == ""
