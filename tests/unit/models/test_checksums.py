"""Hashes of model files: from lists beside them, and from names in the hub's cache."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from virnuc_core.errors import DamagedFileError
from virnuc_core.models.catalogue import BUNDLED_HEADS, CATALOGUE
from virnuc_core.models.hub import SUMS_NAME, check_hash, read_sums, write_sums

BUNDLED = {entry.source for entry in CATALOGUE if isinstance(entry.source, Path)}
BUNDLED |= {path.parent for path in BUNDLED_HEADS.values()}


def test_bundled_files_are_those_that_are_listed() -> None:
    for folder in BUNDLED:
        files = [path for path in folder.iterdir() if path.name != SUMS_NAME]
        assert set(read_sums(folder / SUMS_NAME)) == {path.name for path in files}
        assert [check_hash(path)[1] for path in files] == [""] * len(files)


def test_a_list_is_that_of_sha256sum_and_tells_altered_missing_and_unlisted_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path in files:
        path.write_text(path.name)
    assert check_hash(files[0]) == ("", "")
    write_sums(tmp_path, files[:2])
    subprocess.run(["sha256sum", "--check", "--quiet", SUMS_NAME], cwd=tmp_path, check=True)
    files[0].write_text("other")
    files[1].unlink()
    problems = [check_hash(path)[1] for path in files]
    assert "a is not what it was" in problems[0]
    assert "b is missing" in problems[1]
    assert "c is not in" in problems[2]


@pytest.mark.parametrize("content", [b"no hash  a\n", b"\xff\xfe", b"0" * 64 + b"  ../a\n", b"\n"])
def test_what_is_no_list_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SUMS_NAME).write_bytes(content)
    (tmp_path / "a").touch()
    with pytest.raises(DamagedFileError, match="is not a list of SHA-256"):
        check_hash(tmp_path / "a")


@pytest.mark.parametrize("kind", ["sha256", "git"])
def test_files_of_the_hubs_cache_are_named_by_their_hashes(kind: str, tmp_path: Path) -> None:
    content = b"weights" * 1000
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    name = hashlib.sha256(content).hexdigest() if kind == "sha256" else git
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(content)
    (tmp_path / "model.bin").symlink_to(tmp_path / "blobs" / name)
    assert check_hash(tmp_path / "model.bin") == ("the model hub", "")
    (tmp_path / "blobs" / name).write_bytes(content[:-1] + b"!")
    assert "is damaged: its content is not what the model hub says" in check_hash(tmp_path / "model.bin")[1]
