"""What becomes of each file of an inbox, with a stand-in for the run over it."""

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.nightly import Attempt, DigestCache, Night, iter_inbox, lock_results
from tasks.pages.nightly_page import Outcome
from virnuc_core.errors import DeviceMemoryError, InputError, MismatchError, UsageError
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest

OLD = 1_000_000_000.0


class Predictor:
    """Leaves the report of a run, or ends with the error that the content of the file is mapped to."""

    def __init__(self) -> None:
        self.errors: dict[str, BaseException] = {}
        self.meanwhile: Callable[[Path], object] = lambda path: None
        self.calls: list[tuple[str, str]] = []

    def __call__(self, path: Path, out: Path) -> Attempt:
        self.calls.append((path.name, out.name))
        content = path.read_text()
        out.mkdir(exist_ok=True)
        sha256 = input_digest(path).sha256
        self.meanwhile(path)
        error = self.errors.get(content)
        if error is None:
            document = {"inputs": [{"sha256": sha256}], "counts": {"records": 3, "contigs_virus": 2}}
            RunFolder(out).report.write_text(json.dumps(document))
        return Attempt(error=error, link="http://127.0.0.1/run")


class Nights:
    """An inbox, and nights over it."""

    def __init__(self, root: Path) -> None:
        self.inbox, self.out = root / "inbox", root / "out"
        self.inbox.mkdir()
        self.out.mkdir()
        self.predict = Predictor()

    def put(self, name: str, content: str, modified: float = OLD) -> Path:
        path = self.inbox / name
        path.write_text(content)
        os.utime(path, (modified, modified))
        return path

    def night(self) -> dict[str, Outcome]:
        digests = DigestCache(self.out / "digests.json")
        files = list(iter_inbox(str(self.inbox)))
        outcomes = Night(self.out, digests, self.predict, 60.0).work_through(files)
        digests.save()
        return {outcome.path.name: outcome for outcome in outcomes}

    def statuses(self) -> dict[str, str]:
        return {name: outcome.status for name, outcome in self.night().items()}


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_each_file_is_computed_once(nights: Nights) -> None:
    nights.put("a.fa", "one")
    nights.put("b.fa", "two")
    first = nights.night()
    assert [outcome.status for outcome in first.values()] == ["done", "done"]
    assert (first["a.fa"].contigs, first["a.fa"].contigs_virus) == (3, 2)
    assert first["a.fa"].results == nights.out / f"a-{input_digest(nights.inbox / 'a.fa').sha256[:12]}"

    nights.put("c.fa", "three")
    again = nights.night()
    assert {name: outcome.status for name, outcome in again.items()} == {
        "a.fa": "kept",
        "b.fa": "kept",
        "c.fa": "done",
    }
    assert again["a.fa"].results == first["a.fa"].results
    assert [name for name, _ in nights.predict.calls] == ["a.fa", "b.fa", "c.fa"]


def test_bytes_count_and_not_names(nights: Nights) -> None:
    nights.put("a.fa", "one").rename(nights.inbox / "first.fa")
    nights.put("copy.fasta", "one")
    outcomes = nights.night()
    assert [outcome.status for outcome in outcomes.values()] == ["done", "kept"]
    assert "copy.fasta" in outcomes["first.fa"].reason
    assert len(nights.predict.calls) == 1

    (nights.inbox / "copy.fasta").rename(nights.inbox / "renamed.fa")
    assert nights.statuses() == {"first.fa": "kept", "renamed.fa": "kept"}
    nights.put("first.fa", "other", modified=OLD + 1)
    assert nights.statuses() == {"first.fa": "done", "renamed.fa": "kept"}


def test_bad_file_is_moved_aside_with_its_copies_and_stops_no_other(nights: Nights) -> None:
    nights.predict.errors["bad"] = InputError("a.fa is truncated.")
    nights.put("a.fa", "bad")
    nights.put("b.fa", "bad")
    nights.put("c.fa", "good")
    assert nights.statuses() == {"a.fa": "rejected", "b.fa": "rejected", "c.fa": "done"}
    for name in ("a.fa", "b.fa"):
        assert (nights.inbox / "rejected" / f"{name}.reason.txt").read_text() == "a.fa is truncated.\n"
    assert nights.statuses() == {"c.fa": "kept"}
    assert len(nights.predict.calls) == 2


@pytest.mark.parametrize(
    "error",
    [DeviceMemoryError("no room"), MismatchError("another preset"), OSError(errno.EIO, "disk")],
    ids=["retryable", "settings", "foreign"],
)
def test_failure_leaves_the_file_for_the_next_night(nights: Nights, error: Exception) -> None:
    nights.predict.errors["one"] = error
    path = nights.put("a.fa", "one")
    nights.put("b.fa", "two")
    outcomes = nights.night()
    assert [outcome.status for outcome in outcomes.values()] == ["failed", "done"]
    assert type(error).__name__ in outcomes["a.fa"].reason
    assert path.exists()
    nights.predict.errors.clear()
    assert nights.statuses() == {"a.fa": "done", "b.fa": "kept"}


def test_disk_that_cannot_be_read_is_no_fault_of_the_file(nights: Nights) -> None:
    """As the reader tells both: an InputError, with the error of the disk as its cause."""
    unreadable = InputError("a.fa cannot be read")
    unreadable.__cause__ = OSError(errno.EIO, os.strerror(errno.EIO))
    damaged = InputError("b.fa cannot be read")
    damaged.__cause__ = OSError("invalid data stream")
    nights.predict.errors |= {"one": unreadable, "two": damaged}
    nights.put("a.fa", "one")
    nights.put("b.fa", "two")
    assert nights.statuses() == {"a.fa": "failed", "b.fa": "rejected"}


def test_unfinished_run_goes_on_in_its_folder_under_another_name(nights: Nights) -> None:
    nights.predict.errors["one"] = DeviceMemoryError("no room")
    nights.put("a.fa", "one")
    nights.night()
    nights.predict.errors.clear()
    (nights.inbox / "a.fa").rename(nights.inbox / "b.fa")
    nights.night()
    folders = [folder for _, folder in nights.predict.calls]
    assert folders[0] == folders[1]
    assert folders[0].startswith("a-")


def test_file_that_is_being_written_waits(nights: Nights) -> None:
    nights.put("a.fa", "half", modified=time.time() - 30)
    outcome = nights.night()["a.fa"]
    assert (outcome.status, nights.predict.calls) == ("waiting", [])

    # Upload that goes on while the first half is read, and is no bad file therefore.
    nights.predict.errors["half"] = InputError("a.fa is truncated.")
    nights.predict.meanwhile = lambda path: nights.put("a.fa", "half and half", modified=OLD + 1)
    nights.put("a.fa", "half")
    assert nights.statuses() == {"a.fa": "waiting"}
    nights.predict.meanwhile = lambda path: None
    assert nights.statuses() == {"a.fa": "done"}


def test_results_of_other_bytes_do_not_count(nights: Nights) -> None:
    """The file was replaced after its hash was taken, and the run is over what came after."""
    path = nights.put("a.fa", "one")
    results = nights.out / f"a-{input_digest(path).sha256[:12]}"
    results.mkdir()
    report = {"inputs": [{"sha256": "0" * 64}], "counts": {"records": 1, "contigs_virus": 1}}
    RunFolder(results).report.write_text(json.dumps(report))
    assert nights.statuses() == {"a.fa": "done"}
    RunFolder(results).report.write_text("{}")
    assert nights.statuses() == {"a.fa": "done"}
    assert len(nights.predict.calls) == 2


def test_name_that_is_no_text_is_refused_and_stops_no_other(nights: Nights) -> None:
    path = Path(os.fsdecode(os.fsencode(nights.inbox) + b"/probe_\xfc.fa"))
    path.write_text("one")
    os.utime(path, (OLD, OLD))
    nights.put("z.fa", "two")
    outcomes = list(nights.night().values())
    assert sorted(outcome.status for outcome in outcomes) == ["done", "rejected"]
    assert {outcome.name for outcome in outcomes} == {"probe_\N{REPLACEMENT CHARACTER}.fa", "z.fa"}


def test_bad_file_that_cannot_be_moved_stays_and_fails(nights: Nights) -> None:
    nights.predict.errors["bad"] = InputError("a.fa is truncated.")
    path = nights.put("a.fa", "bad")
    (nights.inbox / "rejected").write_text("in the way")
    outcome = nights.night()["a.fa"]
    assert outcome.status == "failed"
    assert "truncated" in outcome.reason
    assert "moved aside" in outcome.reason
    assert path.exists()


def test_second_night_finds_the_results_taken(tmp_path: Path) -> None:
    with lock_results(tmp_path / "out") as first, lock_results(tmp_path / "out") as second:
        assert (first, second) == (True, False)
    with lock_results(tmp_path / "out") as third:
        assert third


def test_results_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="cannot be written"), lock_results(tmp_path / "out"):
        pass
