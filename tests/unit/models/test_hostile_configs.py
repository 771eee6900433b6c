"""Descriptions and headers of checkpoints that no model can have."""

import json
from pathlib import Path

import pytest

from benchmarks.reliability.binary_edits import hostile_json
from benchmarks.reliability.crafted import safetensors_headers
from benchmarks.reliability.material import make_models
from virnuc_core.errors import CheckpointError
from virnuc_core.models.catalogue import require_known_model, resolve_head
from virnuc_core.models.hub import open_checkpoint


@pytest.fixture
def models(tmp_path: Path) -> Path:
    make_models(tmp_path)
    return tmp_path


def load(path: Path) -> None:
    checkpoint = open_checkpoint(str(path), None)
    checkpoint.state_dict()


def test_the_material_is_valid(models: Path) -> None:
    for name in ("esm2", "dnabert", "sharded", "esm2_fair.pt"):
        load(models / name)


@pytest.mark.parametrize("name", hostile_json("num_hidden_layers"))
def test_hostile_configs(name: str, models: Path) -> None:
    (models / "esm2" / "config.json").write_bytes(hostile_json("num_hidden_layers")[name])
    with pytest.raises(CheckpointError):
        load(models / "esm2")


@pytest.mark.parametrize("value", [0, -2, 2.5, 1e999, float("nan"), 10**400, True, "2", [2], None, 1 << 40])
@pytest.mark.parametrize("field", ["num_attention_heads", "layer_norm_eps", "intermediate_size"])
def test_numbers_that_no_model_has(field: str, value: object, models: Path) -> None:
    path = models / "dnabert" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=field):
        load(models / "dnabert")


@pytest.mark.parametrize(
    "name", ["../dnabert/model.safetensors", "/etc/passwd", "a\0", "x" * 5000, "", 3, None, "\x1b[2J"]
)
def test_an_index_names_files_beside_it(name: object, models: Path) -> None:
    path = models / "sharded" / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="is not an index of weight shards"):
        load(models / "sharded")


@pytest.mark.parametrize("name", safetensors_headers())
def test_hostile_safetensors(name: str, models: Path) -> None:
    (models / "dnabert" / "model.safetensors").write_bytes(safetensors_headers()[name])
    with pytest.raises(CheckpointError) as caught:
        load(models / "dnabert")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~nobody-here/x", "\ud800"])
def test_impossible_names(name: str) -> None:
    with pytest.raises(CheckpointError, match="there is no model"):
        require_known_model(name, "esm2")
    with pytest.raises(CheckpointError, match="there is no classifier head"):
        resolve_head(name)
