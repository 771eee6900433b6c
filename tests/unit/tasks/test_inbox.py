"""What counts as a file of an inbox, when it has arrived, and that it is read once."""

import json
import logging
import os
import time
from pathlib import Path

import pytest

from tasks.nightly import DigestCache, Look, iter_inbox, open_digests, results_name, sample_name, set_aside
from virnuc_core.errors import InputError, UsageError

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
        ("a.gz", None),
        ("a.fa.md5", None),
        ("a.fa.part", None),
        ("proteins.faa", None),
        (".a.fa", None),
        ("fa", None),
        ("rejected", None),
    ],
)
def test_sequence_files_are_known_by_their_suffixes(name: str, sample: str | None) -> None:
    assert sample_name(Path(name)) == sample


def test_results_are_named_by_sample_and_bytes() -> None:
    assert results_name(Path("in/a.fa.gz"), "0123456789abcdef") == "a-0123456789ab"
    longest = results_name(Path("ü" * 200 + ".fa"), "0123456789abcdef")
    assert len(longest.encode()) < 255


def test_folder_gives_the_sequence_files_directly_in_it(tmp_path: Path) -> None:
    files = [put(tmp_path / name) for name in ("a.fa", "b.fq.gz")]
    for name in (".c.fa", "notes.txt", "sub/d.fa", "rejected/e.fa"):
        put(tmp_path / name)
    (tmp_path / "folder.fa").mkdir()
    (tmp_path / "dangling.fa").symlink_to(tmp_path / "nothing")
    assert [file.path for file in iter_inbox(str(tmp_path))] == files


def test_glob_reaches_into_subfolders_but_not_to_rejected_files(tmp_path: Path) -> None:
    wanted = [put(tmp_path / name) for name in ("one/c.fa", "two/deep/c.fa")]
    for name in ("one/rejected/c.fa", "one/c.txt", ".hidden/c.fa"):
        put(tmp_path / name)
    assert [file.path for file in iter_inbox(f"{tmp_path}/**/c.*")] == wanted
    assert list(iter_inbox(f"{tmp_path}/none/*.fa")) == []


def test_inbox_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="inbix"):
        list(iter_inbox(str(tmp_path / "inbix")))


def test_file_waits_while_it_is_young_or_changing(tmp_path: Path) -> None:
    settled = Look.at(put(tmp_path / "a.fa"))
    assert settled.reason_to_wait(60.0) is None

    young = Look.at(put(tmp_path / "b.fa", modified=time.time() - 20))
    assert "written 2" in (young.reason_to_wait(60.0) or "")
    assert young.reason_to_wait(10.0) is None

    future = Look.at(put(tmp_path / "c.fa", modified=time.time() + 1e6))
    assert "future" in (future.reason_to_wait(60.0) or "")
    assert future.reason_to_wait(0.0) is None

    put(tmp_path / "a.fa", ">a\nACGTA\n")
    assert "changed" in (settled.reason_to_wait(0.0) or "")
    (tmp_path / "a.fa").unlink()
    assert "not there" in (settled.reason_to_wait(0.0) or "")


def test_file_is_set_aside_beside_its_reason_and_replaces_no_other(tmp_path: Path) -> None:
    first = set_aside(put(tmp_path / "a.fa", "one"), "1" * 64, "It is bad.")
    second = set_aside(put(tmp_path / "a.fa", "two"), "2" * 64, "It is bad as well.")
    assert first == tmp_path / "rejected" / "a.fa"
    assert second == tmp_path / "rejected" / "222222222222-a.fa"
    assert (first.read_text(), second.read_text()) == ("one", "two")
    assert first.with_name("a.fa.reason.txt").read_text() == "It is bad.\n"
    assert second.with_name("222222222222-a.fa.reason.txt").read_text() == "It is bad as well.\n"
    assert not (tmp_path / "a.fa").exists()


def test_digest_is_kept_as_long_as_size_and_time_are_the_same(tmp_path: Path) -> None:
    """The same size and time with other bytes shows that a file is not read again."""
    path, cache = put(tmp_path / "a.fa", "one"), tmp_path / "cache.json"
    with open_digests(cache) as digests:
        first = digests.sha256(Look.at(path))
    put(path, "two")
    assert DigestCache(cache).sha256(Look.at(path)) == first
    put(path, "two", modified=OLD + 1)
    with open_digests(cache) as digests:
        assert digests.sha256(Look.at(path)) != first


def test_digest_of_a_file_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    with open_digests(cache) as digests:
        for name in ("a.fa", "b.fa"):
            digests.sha256(Look.at(put(tmp_path / name)))
    with open_digests(cache) as digests:
        digests.sha256(Look.at(tmp_path / "b.fa"))
    assert list(json.loads(cache.read_text())["files"]) == [str(tmp_path / "b.fa")]


def test_digest_of_a_file_that_changed_meanwhile_is_not_kept(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    look = Look.at(put(tmp_path / "a.fa"))
    put(tmp_path / "a.fa", "other bytes")
    with open_digests(cache) as digests:
        digests.sha256(look)
    assert not cache.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"files": {"a": 1}}', '{"files": {"a": [1, 2, 3, 4]}}', "\0"])
def test_damaged_cache_is_started_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text(content)
    with caplog.at_level(logging.WARNING), open_digests(cache) as digests:
        digests.sha256(Look.at(put(tmp_path / "a.fa")))
    assert "read again" in caplog.text
    assert list(json.loads(cache.read_text())["files"]) == [str(tmp_path / "a.fa")]


def test_cache_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_digests(tmp_path / "no folder" / "cache.json") as digests:
        assert len(digests.sha256(Look.at(put(tmp_path / "a.fa")))) == 64
    assert "cannot be written" in caplog.text


def test_file_that_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    look = Look.at(put(tmp_path / "a.fa"))
    (tmp_path / "a.fa").unlink()
    with pytest.raises(InputError, match="does not exist"):
        DigestCache(tmp_path / "cache.json").sha256(look)
