"""The digest of a model file is looked up only while the file is as it was when it was read."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.made_models import make_models, plan_run, write_contigs
from virnuc_core.errors import MismatchError
from virnuc_core.models import digests
from virnuc_core.models.catalogue import BUNDLED_HEADS, find_entries
from virnuc_core.models.digests import digest_folder, kept_digest, new_digest
from virnuc_core.models.hub import open_checkpoint, verify

CONTENT = b"weights" * 1000
RIGHT, PLANTED = sha256(CONTENT).hexdigest(), "0" * 64


@pytest.fixture(autouse=True)
def home(tmp_path: Path, set_env: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    set_env(VIRNUC_HOME=tmp_path / "home")
    monkeypatch.setattr(digests, "_CLOCK_STEP_NS", 0)
    return tmp_path / "home"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that was written a while ago, as far as its file system can tell."""
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "model.safetensors"
    path.write_bytes(CONTENT)
    until_later_than(path)
    return path


def until_later_than(path: Path) -> None:
    """Waits until a change would get a later time than the last one to this file."""
    probe = path.with_name("probe")
    while not probe.exists() or probe.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        probe.write_text("")
    probe.unlink()


def plant() -> None:
    """Replaces all that is kept, so that it shows when it is looked up."""
    kept = list(digest_folder().iterdir())
    assert kept
    for file in kept:
        file.write_text(PLANTED)


def test_a_file_is_read_once(path: Path) -> None:
    assert kept_digest(path) == RIGHT
    plant()
    link = path.with_name("link")
    link.symlink_to(path)
    assert kept_digest(path) == kept_digest(link) == PLANTED
    assert new_digest(path) == kept_digest(path) == RIGHT
    assert {file.name for file in path.parent.iterdir()} == {path.name, "link"}  # which may be read-only


def restore_times(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def overwrite(path: Path) -> None:
    before = path.stat()
    path.write_bytes(CONTENT[:-1] + b"!")
    restore_times(path, before)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT[:-1] + b"!")
    restore_times(other, path.stat())
    other.replace(path)


def append(path: Path) -> None:
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"!")
    restore_times(path, before)


def copy(path: Path) -> None:
    shutil.copy2(path, path.with_name("other"))
    path.with_name("other").replace(path)


@pytest.mark.parametrize("change", [overwrite, replace, append, copy, Path.touch])
def test_a_changed_file_is_read_again(change: Callable[[Path], None], path: Path) -> None:
    kept_digest(path)
    plant()
    change(path)
    assert kept_digest(path) == sha256(path.read_bytes()).hexdigest()


def test_a_file_that_may_still_be_written_is_read_every_time(
    path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_CLOCK_STEP_NS", 10**12)
    assert kept_digest(path) == new_digest(path) == RIGHT
    assert not (home / "digests").exists()


@pytest.mark.parametrize(
    "content", [b"", b"0" * 63, b"0" * 65, b"0" * 64 + b"\n", b"G" * 64, b"\xff" * 64, b"{}"]
)
def test_what_is_no_digest_is_written_again(content: bytes, path: Path) -> None:
    kept_digest(path)
    [kept] = digest_folder().iterdir()
    kept.write_bytes(content)
    assert kept_digest(path) == RIGHT
    assert kept.read_text() == RIGHT


def test_a_home_that_cannot_be_written_keeps_nothing(
    path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    home.write_text("no folder")
    assert kept_digest(path) == RIGHT
    assert f"the hash of {path} is not kept" in caplog.text
    home.unlink()
    kept_digest(path)
    [kept] = digest_folder().iterdir()
    kept.unlink()
    kept.mkdir()
    assert kept_digest(path) == RIGHT
    assert list(digest_folder().iterdir()) == [kept]


def test_processes_at_once(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from virnuc_core.models import digests; digests._CLOCK_STEP_NS = 0\n"
        "for _ in range(30): print(digests.new_digest(Path(sys.argv[1])), digests.kept_digest(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate()[0] for process in processes} == {f"{RIGHT} {RIGHT}\n" * 30}
    [kept] = digest_folder().iterdir()
    assert kept.read_text() == RIGHT


@pytest.mark.parametrize("name", ["esm2:tiny", "dnabert:tiny"])
def test_models_are_opened_with_kept_digests_and_verified_with_new_ones(name: str) -> None:
    family, _, short = name.partition(":")
    [entry] = find_entries(short, "esm2" if family == "esm2" else "dnabert_s")

    def fingerprint() -> str:
        return open_checkpoint(short, entry.family).fingerprint

    right = fingerprint()
    plant()
    assert fingerprint() != right
    found = verify(name)
    assert (found.problems, found.fingerprint, fingerprint()) == ((), right, right)


def test_a_lane_looks_up_what_was_hashed_for_the_plan(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    models = make_models(tmp_path / "models")
    until_later_than(models.dnabert / "tokenizer.json")
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 3), models.config())
    plant()
    with pytest.raises(
        MismatchError, match=r"the files of model \S+ .* have changed since the run was planned"
    ):
        run.compute()
    for path in (models.esm2, models.dnabert):
        assert verify(str(path)).is_whole
    run.compute()


def test_the_fingerprint_of_a_head_is_its_digest() -> None:
    path = BUNDLED_HEADS["tiny"]
    assert verify("tiny").fingerprint == sha256(path.read_bytes()).hexdigest()
