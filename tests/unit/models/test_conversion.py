"""Converted weights give bit-identical vectors and scores."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.made_models import ESM2, GOLDEN, make_models
from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import file_digest
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.classifier import load_classifier
from virnuc_core.models.conversion import convert
from virnuc_core.models.hub import check_hash, open_checkpoint

HEAD = GOLDEN / "classifier" / "pickled_module.pth"
IDS = torch.randint(5, 24, (40,), generator=torch.Generator().manual_seed(0))


def hidden_states(path: Path) -> torch.Tensor:
    model = load_model(open_checkpoint(str(path), None), "cpu", "fp32")
    with torch.inference_mode():
        return model(IDS, model.build_layout(np.array([0, 25, 40], np.int32), "reference"))


@pytest.mark.parametrize("kind", ["fair-esm", "DNABERT-S", "DNABERT-S in a torch file"])
def test_a_converted_model_is_the_same(kind: str, tmp_path: Path) -> None:
    source = ESM2 if kind == "fair-esm" else make_models(tmp_path).dnabert
    if kind == "DNABERT-S in a torch file":
        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    out = tmp_path / "out" / "converted"
    out.parent.mkdir()
    done = convert(source, out)
    assert (done.kind, done.out) == ("model", out)
    assert torch.equal(hidden_states(source), hidden_states(out))
    assert done.fingerprint == open_checkpoint(str(out), None).fingerprint
    for path in (out / "model.safetensors", out / "config.json"):
        assert check_hash(path, file_digest(path)) == (str(out / "SHA256SUMS"), "")
    assert list(out.parent.iterdir()) == [out]
    if kind != "fair-esm":
        assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_transformers_reads_what_was_converted(tmp_path: Path) -> None:
    from transformers import EsmModel

    convert(ESM2, tmp_path / "esm2")
    model, told = EsmModel.from_pretrained(
        tmp_path / "esm2", output_loading_info=True, add_pooling_layer=False
    )
    assert not told["unexpected_keys"]
    # The contact head is not part of the model, and the frequencies are computed.
    assert {key for key in told["missing_keys"] if "contact" not in key} <= {"rotary_embeddings.inv_freq"}
    with torch.inference_mode():
        theirs = model.eval()(IDS[None, :25], attention_mask=torch.ones(1, 25)).last_hidden_state[0]
    torch.testing.assert_close(hidden_states(tmp_path / "esm2")[:25], theirs, atol=2e-5, rtol=1e-4)


def test_a_pickled_head_gives_the_same_scores(tmp_path: Path) -> None:
    assert convert(HEAD, tmp_path / "head.safetensors").kind == "head"
    with np.load(GOLDEN / "classifier" / "golden.npz") as golden:
        features = torch.from_numpy(golden["features"])
    before, after = load_classifier(HEAD), load_classifier(tmp_path / "head.safetensors")
    assert torch.equal(before.virus_probabilities(features), after.virus_probabilities(features))


@pytest.mark.parametrize(
    ("source", "out", "error", "message"),
    [
        (HEAD, "head.pth", UsageError, r"is a head, so give a file, .*head\.safetensors"),
        (ESM2, "model.safetensors", UsageError, "is a model, so give the name of a folder"),
        (ESM2, "", UsageError, "exists already"),
        (ESM2, "no/folder", UsageError, "there is no folder"),
        (Path("absent"), "out", CheckpointError, "there is no file or folder"),
    ],
)
def test_names_that_do_not_fit(
    source: Path, out: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        convert(source, tmp_path / out)
    assert list(tmp_path.iterdir()) == []
