"""Models by name, and their fingerprints; tests/end_to_end/test_models.py fetches them from a hub."""

import os
import shutil
from pathlib import Path

import pytest

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import file_digest
from virnuc_core.models.catalogue import BUNDLED_HEADS, CATALOGUE
from virnuc_core.models.hub import SUMS_NAME, family_of, open_checkpoint


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("esm2:8M", ("esm2", "8M")),
        ("dnabert:/a/b", ("dnabert_s", "/a/b")),
        ("dnabert:zhihan1996/DNABERT-S", ("dnabert_s", "zhihan1996/DNABERT-S")),
        ("random:650M", ("esm2", "random:650M")),
        ("dnabert:random:tiny", ("dnabert_s", "random:tiny")),
    ],
)
def test_family_of(model: str, expected: tuple[str, str]) -> None:
    assert family_of(model) == expected


def test_names_of_no_model_or_of_two() -> None:
    with pytest.raises(CheckpointError, match=r"random:nonsense is not .* one of tiny, 8M"):
        open_checkpoint("random:nonsense", "esm2")
    with pytest.raises(CheckpointError, match="random:650M"):
        open_checkpoint("random:650M", "dnabert_s")
    with pytest.raises(UsageError, match="give esm2:random:tiny or dnabert:random:tiny"):
        open_checkpoint("random:tiny", None)


def test_bundled_files_are_those_that_are_listed() -> None:
    folders = {entry.bundled for entry in CATALOGUE if entry.bundled}
    for folder in folders | {path.parent for path in BUNDLED_HEADS.values()}:
        lines = (folder / SUMS_NAME).read_text().splitlines()
        files = [path for path in folder.iterdir() if path.name != SUMS_NAME]
        assert sorted(lines) == sorted(f"{file_digest(path)}  {path.name}" for path in files)


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    """That of fetched weights is in the name that they have in the hub's cache."""
    shutil.copytree(open_checkpoint("tiny", "dnabert_s").location, tmp_path, dirs_exist_ok=True)

    def fingerprint() -> str:
        return open_checkpoint(str(tmp_path), None).fingerprint

    weights, tokenizer, expected = tmp_path / "model.safetensors", tmp_path / "tokenizer.json", fingerprint()
    status, text = tokenizer.stat(), tokenizer.read_text()
    tokenizer.write_text(text.replace("[UNK]", "[UNL]", 1))
    os.utime(tokenizer, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint() != expected
    tokenizer.write_text(text)
    (tmp_path / "blobs").mkdir()
    for name, is_same in ((file_digest(weights), True), ("0" * 64, False)):
        blob = weights.resolve().rename(tmp_path / "blobs" / name)
        weights.unlink(missing_ok=True)
        weights.symlink_to(blob)
        assert (fingerprint() == expected) == is_same
