"""`virnuc models`: a local model hub, a folder copied to another machine, and runs on the results."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save

from tests.end_to_end.conftest import CommandLine
from tests.made_hub import Hub, running_hub
from virnuc_core.models.catalogue import HubCommit, find_entries
from virnuc_core.models.checkpoint import TRANSFORMERS_ESM, random_state_dict

[SMALLEST] = find_entries("8M", "esm2")
assert isinstance(SMALLEST.source, HubCommit)
OTHER_REPO = "lab/mine"
REPO, COMMIT = SMALLEST.source.repo, SMALLEST.source.revision


def made_8m() -> dict[str, bytes]:
    """A repository with the published architecture and random half-precision weights."""
    spec = SMALLEST.spec
    tensors = {}
    for name, values in random_state_dict(spec, "cpu").items():
        parts = TRANSFORMERS_ESM.sources(name)
        for part, rows in zip(parts, values.half().chunk(len(parts)), strict=True):
            tensors[part] = rows.contiguous()
    config = {
        "model_type": "esm",
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.embedding_dim,
        "num_attention_heads": spec.num_heads,
        "intermediate_size": spec.ffn_dim,
        "vocab_size": spec.vocab_size,
        "layer_norm_eps": spec.layer_norm_eps,
    }
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors)}


@pytest.fixture(scope="module")
def repository() -> dict[str, bytes]:
    return made_8m()


@pytest.fixture
def hub(repository: dict[str, bytes]) -> Iterator[str]:
    with running_hub({REPO: repository, OTHER_REPO: repository}, COMMIT) as address:
        yield address


def models(
    home: Path, endpoint: str, *commands: tuple[str | Path, ...]
) -> list[tuple[int, dict[str, object]]]:
    """In a separate process, because the hub client reads its settings once."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    calls = [["models", *map(str, command), "--json"] for command in commands]
    program = (
        f"from virnuc_cli.main import main\nfor arguments in {calls}:\n    print(main(arguments), flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [(int(code), json.loads(answer)) for answer, code in zip(lines[::2], lines[1::2], strict=True)]


def test_a_model_is_pulled_carried_and_used(
    hub: str, tmp_path: Path, virnuc: CommandLine, repository: dict[str, bytes]
) -> None:
    commands = (("pull", "8M", "--to", tmp_path / "carried"), ("pull", f"esm2:{OTHER_REPO}"))
    (code, document), (other_code, other) = models(tmp_path / "hf", hub, *commands)
    assert (code, other_code) == (0, 0), (document, other)
    assert other["pulled"][0]["fingerprint"] == document["pulled"][0]["fingerprint"]
    assert other["pulled"][0]["revision"] == COMMIT
    [pulled] = document["pulled"]
    assert (pulled["revision"], pulled["hashes_from"]) == (COMMIT, "the model hub")
    copy = Path(pulled["copy"])
    assert copy == tmp_path / "carried" / "8M"
    assert {path.name: path.is_symlink() for path in copy.iterdir()} == {
        "SHA256SUMS": False,
        "config.json": False,
        "model.safetensors": False,
    }
    nowhere = "http://127.0.0.1:9"
    commands = (("list",), ("verify", "8M", copy), ("pull", "650M"))
    (code, document), verified, failed = models(tmp_path / "hf", nowhere, *commands)
    [listed] = [model for model in document["models"] if model["name"] == "8M"]
    assert (listed["here"], listed["location"]) == ("hub cache", pulled["location"])
    assert listed["disk_bytes"] == sum(map(len, repository.values()))
    assert failed[0] == 4
    assert "hf download facebook/esm2_t33_650M_UR50D" in str(failed[1]["error"])
    code, document = verified
    assert code == 0
    assert [model["fingerprint"] for model in document["models"]] == [pulled["fingerprint"]] * 2
    # The other machine has only the folder.
    assert virnuc("models", "verify", copy).code == 0
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    result = virnuc("models", "verify", copy, "--json")
    assert result.code == 4
    [found] = json.loads(result.out)["models"]
    assert "its SHA-256 is not that in" in found["problems"][0]


def test_a_copy_is_made_once(tmp_path: Path, virnuc: CommandLine) -> None:
    for _ in range(2):
        assert virnuc("models", "pull", "dnabert:tiny", "esm2:tiny", "--to", tmp_path / "new").code == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"dnabert_tiny", "esm2_tiny"}
    (tmp_path / "new" / "dnabert_tiny").rename(tmp_path / "there")
    (tmp_path / "new" / "esm2_tiny").rename(tmp_path / "new" / "dnabert_tiny")
    result = virnuc("models", "pull", "dnabert:tiny", "--to", tmp_path / "new")
    assert result.code == 2
    assert "is in the way and is not this model" in result.err


def test_what_comes_damaged_from_the_hub_is_not_used(
    hub: str, tmp_path: Path, repository: dict[str, bytes]
) -> None:
    weights = repository["model.safetensors"]
    Hub.sent = {"model.safetensors": weights[:-2] + bytes((weights[-2] ^ 1, weights[-1]))}
    [(code, document)] = models(tmp_path / "hf", hub, ("pull", "8M", "--to", tmp_path / "carried"))
    assert code == 4
    assert "its content is not what the model hub says" in str(document["error"])
    assert f"Delete {tmp_path}/hf/hub/models--facebook--esm2_t6_8M_UR50D and run" in str(document["error"])
    assert not (tmp_path / "carried").exists()


def test_another_model_under_a_known_name_is_told(hub: str, tmp_path: Path, data_dir: Path) -> None:
    golden = data_dir / "golden" / "dnabert_s"
    files = {name: (golden / name).read_bytes() for name in ("config.json", "model.safetensors")}
    Hub.repositories = {REPO: files}
    [(code, document)] = models(tmp_path / "hf", hub, ("pull", "8M"))
    assert code == 4
    assert "holds a DNABERT-S model where an ESM-2 model is needed" in str(document["error"])


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("tiny", 2, "give esm2:tiny or dnabert:tiny"),
        ("650", 4, "there is no model 650"),
        ("tests", 2, "is a path"),
    ],
)
def test_what_cannot_be_pulled(name: str, code: int, message: str, virnuc: CommandLine) -> None:
    result = virnuc("models", "pull", name)
    assert result.code == code
    assert message in result.err


def test_the_catalogue_for_a_person(virnuc: CommandLine) -> None:
    result = virnuc("models", "list")
    assert result.code == 0
    lines = {tuple(line.split()[:2]): line for line in result.out.splitlines() if line.strip()}
    assert "103,000 aa/s" in lines["3B", "protein"]
    assert lines["15B", "protein"].endswith("NA")
    assert f"{REPO}@{COMMIT}" in lines["esm2:8M", "no"]
    assert "bundled" in lines["head", "tiny-500"]


def test_bundled_models_and_heads_are_verified(virnuc: CommandLine) -> None:
    result = virnuc("models", "verify", "esm2:tiny", "dnabert:tiny", "tiny-300", "tiny-500")
    assert result.code == 0
    assert result.out.count(": whole") == 4
    assert result.out.count("SHA256SUMS") == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny", "give esm2:tiny or dnabert:tiny"),
        ("15B", "not on this machine: virnuc models pull 15B"),
        ("absent.pt", "there is no file or folder absent.pt"),
        ("README.md", "is neither a head nor a model"),
    ],
)
def test_what_is_not_whole(name: str, message: str, virnuc: CommandLine) -> None:
    result = virnuc("models", "verify", name)
    assert result.code == 4
    assert message in result.out


def test_what_is_converted_is_whole(virnuc: CommandLine, data_dir: Path, tmp_path: Path) -> None:
    golden = data_dir / "golden"
    for source, out, kind in (
        (golden / "esm2" / "esm2_t4_made.pt", tmp_path / "esm2", "model"),
        (golden / "classifier" / "pickled_module.pth", tmp_path / "head.safetensors", "head"),
    ):
        result = virnuc("models", "convert", source, "--out", out, "--json")
        assert result.code == 0, result.err
        done = json.loads(result.out)
        assert done["kind"] == kind
        [found] = json.loads(virnuc("models", "verify", out, "--json").out)["models"]
        assert (found["whole"], found["fingerprint"]) == (True, done["fingerprint"])
    result = virnuc("models", "convert", golden / "esm2" / "esm2_t4_made.pt", "--out", tmp_path / "esm2")
    assert result.code == 2
    assert "exists already" in result.err
