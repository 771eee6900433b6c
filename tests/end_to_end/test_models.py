"""`virnuc models`: a local model hub, a folder copied to another machine, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import CommandLine
from tests.made_hub import running_hub
from tests.made_models import GOLDEN, write_model
from virnuc_core.models.catalogue import HubCommit, find_entries

[SMALLEST], [LARGER] = (find_entries(name, "esm2") for name in ("8M", "35M"))
assert isinstance(SMALLEST.source, HubCommit)
assert isinstance(LARGER.source, HubCommit)
REPO, COMMIT = SMALLEST.source.repo, SMALLEST.source.revision


def models(home: Path, endpoint: str, *commands: tuple[object, ...]) -> list[tuple[int, dict[str, Any]]]:
    """Exit codes and documents; in a separate process, because the hub client reads its settings once."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    calls = [["models", *map(str, command), "--json"] for command in commands]
    program = (
        f"from virnuc_cli.main import main\nfor arguments in {calls}:\n    print(main(arguments), flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [(int(code), json.loads(answer)) for answer, code in zip(lines[::2], lines[1::2], strict=True)]


def test_a_model_is_pulled_carried_and_used(virnuc: CommandLine, tmp_path: Path) -> None:
    made = write_model(tmp_path / "8M", SMALLEST.spec)
    repository = {path.name: path.read_bytes() for path in made.iterdir()}
    weights = bytearray(repository["model.safetensors"])
    weights[-2] ^= 1
    home, carried = tmp_path / "hf", tmp_path / "carried"
    repositories = dict.fromkeys((REPO, "lab/mine", "lab/damaged"), repository)
    with running_hub(repositories, COMMIT, {"lab/damaged/model.safetensors": bytes(weights)}) as hub:
        pulled, mine, damaged = models(
            home,
            hub,
            ("pull", "8M", "--to", carried),
            ("pull", "esm2:lab/mine"),
            ("pull", "esm2:lab/damaged", "--to", tmp_path / "not_made"),
        )
    assert pulled[0] == mine[0] == 0, (pulled, mine)
    [[model], [same]] = pulled[1]["pulled"], mine[1]["pulled"]
    assert (model["revision"], model["hashes_from"]) == (COMMIT, "the model hub")
    assert (same["revision"], same["fingerprint"]) == (COMMIT, model["fingerprint"])
    copy = Path(model["copy"])
    assert copy == carried / "8M"
    names = {"SHA256SUMS", "config.json", "model.safetensors"}
    assert {(path.name, path.is_symlink()) for path in copy.iterdir()} == {(name, False) for name in names}
    assert damaged[0] == 4
    assert "its content is not what the model hub says" in damaged[1]["error"]
    assert f"Delete {home}/hub/models--lab--damaged and run" in damaged[1]["error"]
    assert not (tmp_path / "not_made").exists()
    with running_hub({LARGER.source.repo: repository}, LARGER.source.revision) as hub:
        [(code, other)] = models(home, hub, ("pull", "35M"))
    assert code == 4
    assert "it has 6 layers where 35M has 12" in other["error"]

    nowhere = "http://127.0.0.1:9"
    (_, listed), verified, absent = models(home, nowhere, ("list",), ("verify", "8M", copy), ("pull", "650M"))
    [found] = [each for each in listed["models"] if each["name"] == "8M"]
    assert (found["here"], found["location"]) == ("hub cache", model["location"])
    assert found["disk_bytes"] == sum(map(len, repository.values()))
    assert verified[0] == 0
    assert [each["fingerprint"] for each in verified[1]["models"]] == [model["fingerprint"]] * 2
    assert absent[0] == 4
    assert "hf download facebook/esm2_t33_650M_UR50D" in absent[1]["error"]

    # The other machine has only the folder.
    virnuc.done("models", "verify", copy)
    (copy / "model.safetensors").write_bytes(weights)
    result = virnuc("models", "verify", copy, "--json")
    assert result.code == 4
    [found] = result.document["models"]
    assert "its SHA-256 is not that in" in found["problems"][0]


def test_a_copy_is_made_once(virnuc: CommandLine, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for _ in range(2):
        virnuc.done("models", "pull", "dnabert:tiny", "esm2:tiny", "--to", new)
    assert {path.name for path in new.iterdir()} == {"dnabert_tiny", "esm2_tiny"}
    (new / "dnabert_tiny").rename(tmp_path / "there")
    (new / "esm2_tiny").rename(new / "dnabert_tiny")
    virnuc.refused(2, "is in the way and is not this model", "models", "pull", "dnabert:tiny", "--to", new)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("tiny", 2, "give esm2:tiny or dnabert:tiny"),
        ("650", 4, "there is no model 650"),
        ("tests", 2, "is a path"),
    ],
)
def test_what_cannot_be_pulled(name: str, code: int, message: str, virnuc: CommandLine) -> None:
    virnuc.refused(code, message, "models", "pull", name)


def test_the_catalogue_for_a_person(virnuc: CommandLine) -> None:
    out = virnuc.done("models", "list").out
    lines = {tuple(line.split()[:2]): line for line in out.splitlines() if line.strip()}
    assert "104,000 aa/s" in lines["3B", "protein"]
    assert lines["15B", "protein"].endswith("NA")
    assert f"{REPO}@{COMMIT}" in lines["esm2:8M", "no"]
    assert "bundled" in lines["head", "tiny"]


def test_models_and_heads_are_verified(virnuc: CommandLine) -> None:
    out = virnuc.done("models", "verify", "tiny").out
    assert out.count(": whole") == out.count("SHA256SUMS") == 3
    for words in (
        "esm2, 5 layers",
        "dnabert_s, 2 layers",
        "of 256 and 256 numbers, with an index of genomes",
    ):
        assert words in out
    assert virnuc.done("models", "verify", "esm2:tiny").out in out
    for name, message in (
        ("15B", "not on this machine: virnuc models pull 15B"),
        ("absent.pt", "there is no file or folder absent.pt"),
        ("README.md", "is neither a head nor a model"),
    ):
        result = virnuc("models", "verify", name)
        assert result.code == 4
        assert message in result.out


@pytest.mark.parametrize(
    ("source", "out", "kind"),
    [
        ("esm2/esm2_t4_made.pt", "esm2", "model"),
        ("classifier/pickled_module.pth", "head.safetensors", "head"),
    ],
)
def test_what_is_converted_is_whole(
    source: str, out: str, kind: str, virnuc: CommandLine, tmp_path: Path
) -> None:
    command = ("models", "convert", GOLDEN / source, "--out", tmp_path / out)
    document = virnuc.done(*command, "--json").document
    assert document["kind"] == kind
    [found] = virnuc.done("models", "verify", tmp_path / out, "--json").document["models"]
    assert (found["whole"], found["fingerprint"]) == (True, document["fingerprint"])
    virnuc.refused(2, "exists already", *command)
