"""Models by name, their downloads from a small real hub on localhost, and their fingerprints."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.made_hub import COMMIT, running_hub
from tests.made_models import GOLDEN
from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import file_digest
from virnuc_core.models.catalogue import BUNDLED_HEADS, CATALOGUE
from virnuc_core.models.hub import SUMS_NAME, family_of, open_checkpoint
from virnuc_core.specs import Family

REPOSITORIES = {
    "lab/both": {
        "config.json": (GOLDEN / "dnabert_s" / "config.json").read_bytes(),
        "tokenizer.json": b"{}",
        "model.safetensors": (GOLDEN / "dnabert_s" / "model.safetensors").read_bytes(),
        "pytorch_model.bin": b"the same again",
        "tf_model.h5": b"the same again",
    },
    "lab/bin": {"config.json": b"{}", "pytorch_model.bin": b"weights"},
    "lab/nothing": {"README.md": b"no weights"},
}
NOWHERE = "http://127.0.0.1:9"


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


@pytest.mark.parametrize(
    ("name", "family", "error", "message"),
    [
        ("7B", "esm2", CheckpointError, r"no model 7B: [^,]*, [^,]*, and not one of tiny, 8M, 35M, 150M"),
        ("7B", None, CheckpointError, r"one of tiny(?!.*tiny)"),
        ("tiny", None, UsageError, "give esm2:tiny or dnabert:tiny"),
        ("random:nonsense", "esm2", CheckpointError, r"random:nonsense is not .* one of tiny, 8M"),
        ("random:650M", "dnabert_s", CheckpointError, "random:650M"),
        ("random:tiny", None, UsageError, "esm2:random:tiny"),
    ],
)
def test_names_of_no_model_or_of_two(
    name: str, family: Family | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(name, family)


@pytest.fixture
def hub() -> Iterator[str]:
    with running_hub(REPOSITORIES) as address:
        yield address


def run(home: Path, endpoint: str, code: str, **environment: str) -> str:
    """In a separate process, because the hub client reads its settings once."""
    program = (
        "from virnuc_core.errors import CheckpointError\nfrom virnuc_core.models.hub import fetch, open_checkpoint\n"
        f"commit = {COMMIT!r}\n{code}"
    )
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env = os.environ | {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-c", program], env=env | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FAILING = """
for name, family in {names}:
    try:
        open_checkpoint(name, family)
    except CheckpointError as error:
        print(error)
"""


def test_one_form_of_the_weights_is_fetched_and_kept_for_later(hub: str, tmp_path: Path) -> None:
    online = """
print(*sorted(p.name for p in fetch("lab/both", commit).iterdir()))
print(*sorted(p.name for p in fetch("lab/bin", commit).iterdir()))
found = open_checkpoint("lab/both", None)
print(found.name, found.family, found.revision, found.files[0].name, found.tokenizer_file.name)
"""
    failing = FAILING.format(names=[("lab/nothing", None), ("lab/absent", None)])
    lines = run(tmp_path, hub, online + failing).splitlines()
    assert lines[0] == "config.json model.safetensors tokenizer.json"
    assert lines[1] == "config.json pytorch_model.bin"
    assert lines[2] == f"lab/both dnabert_s {COMMIT} model.safetensors tokenizer.json"
    assert lines[3].startswith("lab/nothing on the model hub holds no model*.safetensors")
    assert lines[4].startswith("lab/absent cannot be fetched from the model hub (RepositoryNotFoundError:")
    offline = """
print(fetch("lab/both", commit).name)
print(fetch("lab/bin", commit).name)
print(fetch("lab/both", None).name)
"""
    failing = FAILING.format(names=[("lab/absent", None)])
    lines = run(tmp_path, NOWHERE, offline + failing).splitlines()
    assert lines[:3] == [COMMIT] * 3
    assert "    hf download lab/absent --local-dir DIR" in lines


def test_without_a_hub_the_error_says_how_to_fetch(tmp_path: Path) -> None:
    failing = FAILING.format(names=[("650M", "esm2")])
    output = run(tmp_path, NOWHERE, failing, HF_HUB_OFFLINE="1")
    revision = "08e4846e537177426273712802403f7ba8261b6c"
    assert output.startswith("facebook/esm2_t33_650M_UR50D cannot be fetched from the model hub (")
    assert output.endswith(
        f"    hf download facebook/esm2_t33_650M_UR50D --revision {revision} --local-dir DIR\n"
        "then give DIR as the model.\n"
    )


def test_bundled_files_are_those_that_are_listed() -> None:
    folders = {entry.source for entry in CATALOGUE if isinstance(entry.source, Path)}
    for folder in folders | {path.parent for path in BUNDLED_HEADS.values()}:
        lines = (folder / SUMS_NAME).read_text().splitlines()
        files = [path for path in folder.iterdir() if path.name != SUMS_NAME]
        assert sorted(lines) == sorted(f"{file_digest(path)}  {path.name}" for path in files)


def test_the_fingerprint_of_fetched_weights_needs_no_reading(tmp_path: Path) -> None:
    tiny = open_checkpoint("tiny", "dnabert_s").location
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    content = (tmp_path / "model.safetensors").read_bytes()
    expected = open_checkpoint(str(tmp_path), None).fingerprint
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    (tmp_path / "model.safetensors").rename(blob)
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert open_checkpoint(str(tmp_path), None).fingerprint == expected
    renamed = blob.rename(blob.with_name("0" * 64))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(renamed)
    assert open_checkpoint(str(tmp_path), None).fingerprint != expected


def test_the_fingerprint_of_a_changed_file_is_another(tmp_path: Path) -> None:
    shutil.copytree(open_checkpoint("tiny", "dnabert_s").location, tmp_path, dirs_exist_ok=True)
    before = open_checkpoint(str(tmp_path), None).fingerprint
    assert open_checkpoint(str(tmp_path), None).fingerprint == before
    status = (tmp_path / "tokenizer.json").stat()
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("[UNK]", "[UNL]", 1))
    os.utime(tmp_path / "tokenizer.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_checkpoint(str(tmp_path), None).fingerprint != before
