"""Converted weights give bit-identical vectors and scores."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.made_models import make_tokenizer
from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.classifier import load_classifier
from virnuc_core.models.conversion import convert
from virnuc_core.models.hub import check_hash, open_checkpoint
from virnuc_core.specs import Family


def vectors(path: Path, family: Family) -> torch.Tensor:
    """Hidden states of a few tokens."""
    model = load_model(open_checkpoint(str(path), family), "cpu", "fp32")
    ids = torch.randint(4, min(model.spec.vocab_size, 24), (40,), generator=torch.Generator().manual_seed(0))
    layout = model.build_layout(np.array([0, 25, 40], np.int32), "reference")
    with torch.inference_mode():
        return model(ids, layout)


def test_fair_esm_becomes_a_published_folder(data_dir: Path, tmp_path: Path) -> None:
    source, out = data_dir / "golden" / "esm2" / "esm2_t4_made.pt", tmp_path / "esm2"
    done = convert(source, out)
    assert (done.kind, done.out) == ("model", out)
    assert torch.equal(vectors(source, "esm2"), vectors(out, "esm2"))
    assert done.fingerprint == open_checkpoint(str(out), "esm2").fingerprint
    assert all(check_hash(out / name)[1] == "" for name in ("model.safetensors", "config.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["esm2"]


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_transformers_reads_what_was_converted(data_dir: Path, tmp_path: Path) -> None:
    from transformers import EsmModel

    golden = data_dir / "golden" / "esm2"
    convert(golden / "esm2_t4_made.pt", tmp_path / "esm2")
    model, told = EsmModel.from_pretrained(
        tmp_path / "esm2", output_loading_info=True, add_pooling_layer=False
    )
    assert not told["unexpected_keys"]
    # The contact head is not part of the model, and the frequencies are computed.
    assert {key for key in told["missing_keys"] if "contact" not in key} <= {"rotary_embeddings.inv_freq"}
    ids = torch.tensor([[0, *range(5, 25), 2]])
    with torch.inference_mode():
        theirs = model.eval()(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        ours_model = load_model(open_checkpoint(str(tmp_path / "esm2"), "esm2"), "cpu", "fp32")
        ours = ours_model(ids[0], ours_model.build_layout(np.array([0, 22], np.int32), "reference"))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("as_torch_file", [False, True])
def test_a_dna_model_keeps_its_tokenizer(data_dir: Path, tmp_path: Path, as_torch_file: bool) -> None:
    source = tmp_path / "source"
    shutil.copytree(data_dir / "golden" / "dnabert_s", source, ignore=shutil.ignore_patterns("*.npz"))
    make_tokenizer(source / "tokenizer.json")
    if as_torch_file:
        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    out = tmp_path / "out"
    convert(source, out)
    assert torch.equal(vectors(source, "dnabert_s"), vectors(out, "dnabert_s"))
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_pickled_head_gives_the_same_scores(data_dir: Path, tmp_path: Path) -> None:
    golden = np.load(data_dir / "golden" / "classifier" / "golden.npz")
    done = convert(data_dir / "golden" / "classifier" / "pickled_module.pth", tmp_path / "head.safetensors")
    assert done.kind == "head"
    features = torch.from_numpy(golden["features"])
    before = load_classifier(data_dir / "golden" / "classifier" / "pickled_module.pth")
    after = load_classifier(tmp_path / "head.safetensors")
    assert torch.equal(before.virus_probabilities(features), after.virus_probabilities(features))
    np.testing.assert_allclose(after.virus_probabilities(features), golden["probabilities"], atol=1e-6)


def test_names_that_do_not_fit(data_dir: Path, tmp_path: Path) -> None:
    head = data_dir / "golden" / "classifier" / "pickled_module.pth"
    model = data_dir / "golden" / "esm2" / "esm2_t4_made.pt"
    for source, out, message in (
        (head, tmp_path / "head.pth", r"is a head, so give a file, .*head\.safetensors"),
        (model, tmp_path / "model.safetensors", "is a model, so give the name of a folder"),
        (model, tmp_path, "exists already"),
        (model, tmp_path / "no" / "folder", "there is no folder"),
    ):
        with pytest.raises(UsageError, match=message):
            convert(source, out)
    with pytest.raises(CheckpointError, match="there is no file or folder"):
        convert(tmp_path / "absent", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
