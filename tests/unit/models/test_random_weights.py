"""Models without files: of the true architecture, and the same ones every time."""

import pytest
import torch

from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import Family


@pytest.mark.parametrize(
    ("name", "shape"),
    [("8M", (6, 320, 20, 1280)), ("3B", (36, 2560, 40, 10240)), ("DNABERT-S", (12, 768, 12, 3072))],
)
def test_architectures_are_the_published_ones(name: str, shape: tuple[int, ...]) -> None:
    [entry] = find_entries(name, None)
    spec = entry.spec
    assert (spec.num_layers, spec.embedding_dim, spec.num_heads, spec.ffn_dim) == shape
    assert spec.token_dropout == (entry.family == "esm2")


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_the_bundled_architecture_is_read_from_its_files(family: Family) -> None:
    checkpoint = open_checkpoint("random:tiny", family)
    assert checkpoint.files == ()
    assert checkpoint.spec == open_checkpoint("tiny", family).spec


def test_dna_models_have_a_vocabulary() -> None:
    assert open_checkpoint("random:DNABERT-S", "dnabert_s").tokenizer_path.is_file()


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_weights_are_the_same_every_time(family: Family) -> None:
    checkpoint = open_checkpoint("random:tiny", family)
    first, second = (load_model(checkpoint, "cpu", "fp32").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 0.01 < float(first["layers.0.ffn_out.weight"].std()) < 0.03
    assert abs(float(first["layers.0.ffn_norm.weight"].mean()) - 1) < 0.1


def test_fingerprints_tell_architectures_apart() -> None:
    found = {open_checkpoint(f"random:{name}", "esm2").fingerprint for name in ("8M", "35M", "tiny")}
    assert len(found) == 3
