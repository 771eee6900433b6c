"""The inbox and the outcome of each file, with a stand-in for predict."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.inbox import (
    Computed,
    DigestCache,
    FileOutcome,
    FileSnapshot,
    NewFile,
    Night,
    NightlyReport,
    iter_inbox,
    sample_name,
    settings_digest,
)
from virnuc_core.errors import (
    CheckpointError,
    DeviceMemoryError,
    InputError,
    UnreadableInputError,
    UsageError,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import input_digest
from virnuc_core.settings import PredictSettings, predict_config

OLD = 1_000_000_000.0


def put(path: Path, content: str = ">a\nACGT\n", modified: float = OLD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (modified, modified))
    return path


def test_inbox_is_a_folder_or_a_glob_of_sequence_files(tmp_path: Path) -> None:
    files = [put(tmp_path / name) for name in ("a.b.FASTA", "a.fa", "b.fna.gz", "c.fastq.zst")]
    assert [sample_name(path) for path in files] == ["a.b", "a", "b", "c"]
    others = ("a.gz", "a.fa.md5", "a.fa.part", "proteins.faa", "fa", ".a.fa", "notes.txt", "rejected/e.fa")
    for name in (*others, "one/rejected/c.fa", "one/c.txt", ".hidden/c.fa"):
        put(tmp_path / name)
    deep = [put(tmp_path / name) for name in ("one/c.fa", "two/deep/c.fa")]
    (tmp_path / "folder.fa").mkdir()
    assert [file.path for file in iter_inbox(str(tmp_path))] == files
    assert [file.path for file in iter_inbox(f"{tmp_path}/**/c.fa")] == deep
    assert list(iter_inbox(f"{tmp_path}/none/*.fa")) == []
    with pytest.raises(UsageError, match="inbix"):
        list(iter_inbox(str(tmp_path / "inbix")))


def test_links_are_found_and_named(tmp_path: Path) -> None:
    """Also those of a folder inside the inbox; the inbox itself may be one."""
    inbox, outside = tmp_path / "inbox", put(tmp_path / "outside" / "c.fa").parent
    plain = put(inbox / "one" / "c.fa")
    for name, target in (("two", outside), ("one/e.fa", outside / "c.fa"), ("one/f.fa", outside / "nothing")):
        (inbox / name).symlink_to(target)
    (tmp_path / "link").symlink_to(inbox)
    for root in (inbox, tmp_path / "link"):
        found = {file.path: file.link for file in iter_inbox(f"{root}/*/*.fa")}
        assert found == {
            root / "one" / "c.fa": None,
            root / "one" / "e.fa": root / "one" / "e.fa",
            root / "one" / "f.fa": root / "one" / "f.fa",
            root / "two" / "c.fa": root / "two",
        }
    assert next(file.link for file in iter_inbox(str(tmp_path / "link" / "one"))) is None
    snapshot = FileSnapshot.of(plain)
    plain.unlink()
    plain.symlink_to(outside / "c.fa")
    assert "changed" in snapshot.reason_to_wait(0.0)


def test_file_waits_while_it_is_young_or_changing(tmp_path: Path) -> None:
    settled = FileSnapshot.of(put(tmp_path / "a.fa"))
    young = FileSnapshot.of(put(tmp_path / "b.fa", modified=time.time() - 20))
    future = FileSnapshot.of(put(tmp_path / "c.fa", modified=time.time() + 1e6))
    assert settled.reason_to_wait(60.0) == young.reason_to_wait(10.0) == future.reason_to_wait(0.0) == ""
    assert "modified 2" in young.reason_to_wait(60.0)
    assert "future" in future.reason_to_wait(60.0)
    put(tmp_path / "a.fa", ">a\nACGTA\n")
    assert "changed" in settled.reason_to_wait(0.0)
    (tmp_path / "a.fa").unlink()
    assert "removed" in settled.reason_to_wait(0.0)


def test_digest_is_kept_as_long_as_size_and_time_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other bytes with the same size and time show that the file is not read again."""
    path, cache = put(tmp_path / "a.fa", "one"), put(tmp_path / "cache.json", "[]")
    digests = DigestCache(cache)
    assert "all files are hashed again" in caplog.text
    first = digests.sha256(FileSnapshot.of(path))
    digests.sha256(FileSnapshot.of(put(tmp_path / "gone.fa")))
    digests.save()
    put(path, "two")
    digests = DigestCache(cache)
    assert digests.sha256(FileSnapshot.of(path)) == first
    digests.save()
    assert "gone.fa" not in cache.read_text()
    put(path, "two", modified=OLD + 1)
    digests = DigestCache(tmp_path / "no folder" / "cache.json")
    assert digests.sha256(FileSnapshot.of(path)) != first
    digests.save()
    assert "files are hashed again next time" in caplog.text


def test_settings_count_unless_they_say_where_and_how_fast(tmp_path: Path) -> None:
    def digest(**given: object) -> str:
        return settings_digest(predict_config(PredictSettings.model_validate(given)))

    assert digest() == digest(devices=("cpu",), token_budget=9, shard_seconds=1.0)
    assert digest() == digest(preset="tiny", esm_model="tiny")
    different: list[dict[str, object]] = [
        {"threshold": 0.6},
        {"fdr": 0.1},
        {"prior": 0.1},
        {"relaxed": True},
        {"min_length": 9},
        {"embeddings": "none"},
        {"chunk_length": 500},
        {"precision": "fp32"},
        {"dnabert_engine": "reference"},
    ]
    assert len({digest(), *(digest(**given) for given in different)}) == 1 + len(different)
    head = put(tmp_path / "head.safetensors", "one")
    first = digest(head=str(head))
    put(head, "two")
    assert digest(head=str(head)) != first
    weights = put(tmp_path / "esm2" / "model.safetensors", "one")
    first = digest(esm_model=str(weights.parent), head=str(head))
    put(weights, "two", modified=OLD + 1)
    assert digest(esm_model=str(weights.parent), head=str(head)) != first
    with pytest.raises(CheckpointError, match="unknown classifier head"):
        digest(head=str(tmp_path / "none"))


class Nights:
    """An inbox and its nights; predict writes its report, or ends with the error of the file's content."""

    def __init__(self, root: Path) -> None:
        self.inbox, self.out = root / "inbox", root / "out"
        self.inbox.mkdir()
        self.out.mkdir()
        self.errors: dict[str, BaseException] = {}
        self.meanwhile: Callable[[], object] = lambda: None
        self.calls: list[tuple[str, str]] = []
        self.settings = ""

    def put(self, name: str, content: str, modified: float = OLD) -> Path:
        return put(self.inbox / name, content, modified)

    def predict(self, new: NewFile) -> Computed:
        self.calls.append((new.file.path.name, new.results.name))
        content, sha256 = new.file.path.read_text(), input_digest(new.file.path).sha256
        new.results.mkdir(exist_ok=True)
        self.meanwhile()
        error = self.errors.get(content)
        if error is None:
            counts = (
                '"counts": {"records": 3, "contigs_virus": 2}, "stage_seconds": {"index": 1.5, "plan": 2}'
            )
            put(RunFolder(new.results).report, f'{{"inputs": [{{"sha256": "{sha256}"}}], {counts}}}')
        return Computed(new, error, "http://127.0.0.1/run")

    def outcomes(self) -> dict[str, FileOutcome]:
        night = Night(str(self.inbox), self.out, self.settings, 60.0)
        for new in night.scan():
            night.settle(self.predict(new))
        return {outcome.name: outcome for _, outcome in sorted(night.outcomes.items())}

    def statuses(self) -> dict[str, str]:
        return {name: outcome.status for name, outcome in self.outcomes().items()}


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_other_settings_are_computed_beside_the_old_results(nights: Nights) -> None:
    nights.put(f"{'ü' * 100}.fa", "one")
    for settings, status in (("a", "done"), ("b", "done"), ("a", "kept")):
        nights.settings = settings
        assert list(nights.statuses().values()) == [status]
    assert len(list(nights.out.glob("*/run.json"))) == 2


def test_only_bad_files_are_moved_aside(nights: Nights) -> None:
    errors = (DeviceMemoryError("none"), OSError(errno.EIO, "disk"), UnreadableInputError("cannot be read"))
    for number, error in enumerate(errors):
        nights.errors[str(number)] = error
        nights.put(f"{number}.fa", str(number))
    outcomes = nights.outcomes()
    assert [outcome.status for outcome in outcomes.values()] == ["failed"] * 3
    assert outcomes["0.fa"].why == "DeviceMemoryError: none"
    nights.errors.clear()
    (nights.inbox / "0.fa").rename(nights.inbox / "9.fa")
    assert set(nights.statuses().values()) == {"done"}
    [before, after] = [results for name, results in nights.calls if name in ("0.fa", "9.fa")]
    assert before == after


def test_file_that_is_being_written_waits(nights: Nights) -> None:
    nights.put("a.fa", "half", modified=time.time() - 30)
    assert (nights.statuses(), nights.calls) == ({"a.fa": "waiting"}, [])
    # An upload that continues while the file is read is not a bad file.
    nights.errors["half"] = InputError("a.fa is truncated.")
    nights.meanwhile = lambda: nights.put("a.fa", "half and half", modified=OLD + 1)
    nights.put("a.fa", "half")
    assert nights.statuses() == {"a.fa": "waiting"}
    nights.meanwhile = lambda: None
    assert nights.statuses() == {"a.fa": "done"}


def test_a_copy_that_was_corrected_meanwhile_is_not_moved_aside(nights: Nights) -> None:
    nights.errors["bad"] = InputError("a.fa is truncated.")
    nights.put("a.fa", "bad")
    nights.put("b.fa", "bad", modified=OLD + 1)
    nights.put("c.fa", "bad", modified=OLD + 3)
    nights.meanwhile = lambda: nights.put("b.fa", "good", modified=OLD + 2)
    assert nights.statuses() == {"a.fa": "rejected", "b.fa": "waiting", "c.fa": "rejected"}
    assert (nights.inbox / "rejected" / "c.fa.reason.txt").read_text() == "a.fa is truncated.\n"


def test_results_of_other_bytes_do_not_count(nights: Nights) -> None:
    """The file was replaced after it was hashed, so the run is over the new bytes."""
    nights.put("a.fa", "one")
    assert nights.statuses() == {"a.fa": "done"}
    [report] = nights.out.glob("a-*/run.json")
    for text in (report.read_text().replace(input_digest(nights.inbox / "a.fa").sha256, "0" * 64), "{}"):
        report.write_text(text)
        assert nights.statuses() == {"a.fa": "done"}
    assert len(nights.calls) == 3


def test_name_that_is_no_text_is_refused_and_stops_no_other(nights: Nights) -> None:
    put(Path(os.fsdecode(os.fsencode(nights.inbox) + b"/probe_\xfc.fa")), "one")
    nights.put("z.fa", "two")
    assert nights.statuses() == {"probe_\N{REPLACEMENT CHARACTER}.fa": "rejected", "z.fa": "done"}


def test_a_rejected_file_replaces_no_other_and_leaves_the_inbox_by_no_link(nights: Nights) -> None:
    nights.errors = {content: InputError(f"Bad {content}.") for content in ("one", "two", "three")}
    rejected, elsewhere = nights.inbox / "rejected", nights.out / "elsewhere"
    for content in ("one", "two"):
        nights.put("a.fa", content)
        assert nights.statuses() == {"a.fa": "rejected"}
    moved = sorted((len(path.name), path.read_text()) for path in rejected.iterdir())
    assert moved == [(4, "one"), (15, "Bad one.\n"), (17, "two"), (28, "Bad two.\n")]
    rejected.rename(elsewhere)
    rejected.symlink_to(elsewhere)
    path = nights.put("a.fa", "three")
    outcome = nights.outcomes()["a.fa"]
    assert outcome.status == "failed"
    assert outcome.why.startswith("Bad three. The file cannot be moved to rejected")
    assert path.exists()
    assert len(list(elsewhere.iterdir())) == 4


def test_report_counts_what_was_computed_and_puts_failures_first() -> None:
    kept = FileOutcome(path=Path("in/old.fa"), status="kept", contigs=9, virus=9, seconds=9.0)
    done = FileOutcome(path=Path("in/new.fa"), status="done", contigs=5, virus=2, seconds=12.4)
    lost = [FileOutcome(path=Path(f"{i}.fa"), status="failed", why="lost") for i in range(5)]
    whole = NightlyReport(inbox="in", out=Path("out"), outcomes=[kept, done, *lost])
    assert whole.summary == "7 files: 1 kept, 1 done, 5 failed"
    amounts = {"contigs": 5, "contigs_virus": 2, "run_seconds": 12, "files_failed": 5, "files_waiting": 0}
    assert whole.metrics.items() >= amounts.items()
    assert whole.failures == "Failed: 0.fa: lost; 1.fa: lost; 2.fa: lost; and 2 more."
    assert [(row["file"], row["virus"]) for row in whole.rows][4:] == [
        ("4.fa", ""),
        ("new.fa", 2),
        ("old.fa", 9),
    ]
    assert NightlyReport(inbox="in", out=Path("out"), outcomes=[kept]).failures == ""
