"""`virnuc models`: a local model hub, a folder copied to another machine, and what is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import CommandLine
from tests.made_hub import running_hub
from tests.made_models import write_model
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.hub import open_checkpoint

[SMALLEST] = find_entries("8M", "esm2")
REPO, COMMIT = SMALLEST.repo, SMALLEST.revision


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
    other_forms = {"pytorch_model.bin": b"the same again", "tf_model.h5": b"the same again"}
    repositories = dict.fromkeys((REPO, "lab/mine", "lab/damaged"), repository | other_forms)
    torch.save(load_file(made / "model.safetensors"), tmp_path / "pytorch_model.bin")
    weights_in_torch = (tmp_path / "pytorch_model.bin").read_bytes()
    repositories["lab/bin"] = {
        "config.json": repository["config.json"],
        "pytorch_model.bin": weights_in_torch,
    }
    repositories["lab/nothing"] = {"README.md": b"no weights"}
    with running_hub(repositories, COMMIT, {"lab/damaged/model.safetensors": bytes(weights)}) as hub:
        pulled, mine, damaged, in_torch, nothing, absent = models(
            home,
            hub,
            ("pull", "8M", "--to", carried),
            ("pull", "esm2:lab/mine"),
            ("pull", "esm2:lab/damaged", "--to", tmp_path / "not_made"),
            *(("pull", f"esm2:lab/{name}") for name in ("bin", "nothing", "absent")),
        )
    assert pulled[0] == mine[0] == 0, (pulled, mine)
    [[model], [same]] = pulled[1]["pulled"], mine[1]["pulled"]
    assert model["revision"] == COMMIT
    assert (same["revision"], same["fingerprint"]) == (COMMIT, model["fingerprint"])
    copy = Path(model["copy"])
    assert copy == carried / "8M"
    names = {"SHA256SUMS", "config.json", "model.safetensors"}
    assert {(path.name, path.is_symlink()) for path in copy.iterdir()} == {(name, False) for name in names}
    assert damaged[0] == 4
    assert "does not match its hash on the model hub" in damaged[1]["error"]
    assert f"Delete {home}/hub/models--lab--damaged and run" in damaged[1]["error"]
    assert not (tmp_path / "not_made").exists()
    assert in_torch[1]["pulled"][0]["revision"] == COMMIT
    assert (nothing[0], absent[0]) == (4, 4)
    assert "lab/nothing on the model hub has no model*.safetensors" in nothing[1]["error"]
    assert (
        "lab/absent cannot be downloaded from the model hub (RepositoryNotFoundError:" in absent[1]["error"]
    )

    nowhere = "http://127.0.0.1:9"
    offline = (("list",), ("pull", "8M"), ("pull", "esm2:lab/bin"), ("pull", "650M"))
    (_, listed), again, cached, absent = models(home, nowhere, *offline)
    assert cached[1]["pulled"][0]["revision"] == COMMIT
    [found] = [each for each in listed["models"] if each["name"] == "8M"]
    assert (found["here"], found["location"]) == ("hub cache", model["location"])
    assert found["disk_bytes"] == sum(map(len, repository.values()))
    assert again[0] == 0
    assert again[1]["pulled"][0]["fingerprint"] == model["fingerprint"]
    assert absent[0] == 4
    command = "hf download facebook/esm2_t33_650M_UR50D --revision [0-9a-f]{40} --local-dir DIR"
    assert re.search(f"    {command}\nthen give DIR as the model", absent[1]["error"])

    # The other machine has only the folder.
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=copy, capture_output=True).returncode == 0
    assert open_checkpoint(str(copy), "esm2").fingerprint == model["fingerprint"]
    (copy / "model.safetensors").write_bytes(weights)
    assert subprocess.run(check, cwd=copy, capture_output=True).returncode == 1
    assert open_checkpoint(str(copy), "esm2").fingerprint != model["fingerprint"]


def test_a_copy_is_made_once(virnuc: CommandLine, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for _ in range(2):
        virnuc.done("models", "pull", "dnabert:tiny", "esm2:tiny", "--to", new)
    assert {path.name for path in new.iterdir()} == {"dnabert_tiny", "esm2_tiny"}
    (new / "dnabert_tiny").rename(tmp_path / "there")
    (new / "esm2_tiny").rename(new / "dnabert_tiny")
    virnuc.refused(2, "exists and is not this model", "models", "pull", "dnabert:tiny", "--to", new)


def test_the_catalogue_for_a_person(virnuc: CommandLine) -> None:
    out = virnuc.done("models", "list").out
    lines = {tuple(line.split()[:2]): line for line in out.splitlines() if line.strip()}
    assert lines["3B", "protein"].split()[2:4] == ["36", "2560"]
    assert f"{REPO}@{COMMIT}" in lines["esm2:8M", "no"]
    assert "bundled" in lines["head", "tiny"]
