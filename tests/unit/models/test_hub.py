"""Downloads from a model hub: a small real server on localhost, and no server at all."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.made_hub import COMMIT, running_hub

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "dnabert_s"
REPOSITORIES = {
    "lab/both": {
        "config.json": (GOLDEN / "config.json").read_bytes(),
        "tokenizer.json": b"{}",
        "model.safetensors": (GOLDEN / "model.safetensors").read_bytes(),
        "pytorch_model.bin": b"the same again",
        "tf_model.h5": b"the same again",
    },
    "lab/bin": {"config.json": b"{}", "pytorch_model.bin": b"weights"},
    "lab/nothing": {"README.md": b"no weights"},
}


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


def test_one_form_of_the_weights_is_fetched_and_kept_for_later(hub: str, tmp_path: Path) -> None:
    online = """
print(*sorted(p.name for p in fetch("lab/both", commit).iterdir()))
print(*sorted(p.name for p in fetch("lab/bin", commit).iterdir()))
found = open_checkpoint("lab/both", None)
print(found.name, found.family, found.revision, found.files[0].name, found.tokenizer_path.name)
for repo in ("lab/nothing", "lab/absent"):
    try:
        fetch(repo, None)
    except CheckpointError as error:
        print(error)
"""
    lines = run(tmp_path, hub, online).splitlines()
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
    nowhere = "http://127.0.0.1:9"
    assert run(tmp_path, nowhere, offline).split() == [COMMIT] * 3


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_hub_the_error_says_how_to_fetch(environment: dict[str, str], tmp_path: Path) -> None:
    code = """
for name, family in (("650M", "esm2"), ("lab/both", None)):
    try:
        open_checkpoint(name, family)
    except CheckpointError as error:
        print(error)
"""
    output = run(tmp_path, "http://127.0.0.1:9", code, **environment)
    revision = "08e4846e537177426273712802403f7ba8261b6c"
    assert "facebook/esm2_t33_650M_UR50D cannot be fetched from the model hub (" in output
    assert (
        f"    hf download facebook/esm2_t33_650M_UR50D --revision {revision} --local-dir DIR\n"
        "then give DIR as the model." in output
    )
    assert "    hf download lab/both --local-dir DIR\n" in output
