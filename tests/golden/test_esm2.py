"""ESM-2 against stored outputs of fair-esm, and against installed fair-esm and transformers."""

from argparse import Namespace
from pathlib import Path

import esm
import numpy as np
import pytest
import torch
from transformers import EsmConfig, EsmModel

from tests.made_models import ESM2, GOLDEN, make_spec, published_config
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.encoders import MASK_TOKEN, Encoder
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import AttentionBackend

SPEC = make_spec("esm2", num_layers=3, embedding_dim=48, num_heads=3, ffn_dim=192)
LENGTHS = [3, 30, 30, 21, 57, 8]


def load(path: Path) -> Encoder:
    return load_model(open_checkpoint(str(path), "esm2"), "cpu", "fp32")


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("repr_layer", range(5))
@torch.inference_mode()
def test_means_of_every_layer_equal_fair_esm(repr_layer: int, backend: AttentionBackend) -> None:
    model = load(ESM2)
    with np.load(GOLDEN / "esm2" / "golden.npz") as golden:
        tokens = Esm2Tokenizer().encode(ByteColumn.from_strings(golden["sequences"].tolist()))
        layout = model.build_layout(tokens.offsets.astype(np.int32), backend)
        means = model.embed(torch.from_numpy(tokens.input_ids), layout, repr_layer)
        np.testing.assert_allclose(means.numpy(), golden[f"mean_layer{repr_layer}"], rtol=0, atol=1e-5)


def random_proteins() -> list[torch.Tensor]:
    """Random proteins with special tokens; two have masked residues."""
    generator = torch.Generator().manual_seed(3)
    proteins = [torch.randint(4, 30, (length,), generator=generator) for length in LENGTHS]
    for tokens in proteins:
        tokens[0], tokens[-1] = 0, 2
    proteins[1][5:9] = MASK_TOKEN
    proteins[4][[1, 30, 55]] = MASK_TOKEN
    return proteins


def check_every_layer(
    model: Encoder, proteins: list[torch.Tensor], expected: list[list[torch.Tensor]]
) -> None:
    """`expected` are hidden states by layer and sequence, which may be padded."""
    layout = model.build_layout(np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int32), "sdpa")
    for layer, of_layer in enumerate(expected):
        found = model(torch.cat(proteins), layout, layer).split(LENGTHS)
        for states, theirs in zip(found, of_layer, strict=True):
            torch.testing.assert_close(states, theirs[: len(states)], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_every_layer_equals_installed_fair_esm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {
        "num_layers": SPEC.num_layers,
        "embed_dim": SPEC.embedding_dim,
        "attention_heads": SPEC.num_heads,
    }
    theirs = esm.model.esm2.ESM2(**sizes).eval()
    arguments = Namespace(
        token_dropout=True, **{f"encoder_{name.removeprefix('num_')}": size for name, size in sizes.items()}
    )
    state = {f"encoder.sentence_encoder.{name}": value for name, value in theirs.state_dict().items()}
    content = {"args": Namespace(arch="esm2"), "cfg": {"model": arguments}, "model": state}
    torch.save(content, tmp_path / "m.pt")
    proteins = random_proteins()
    padded = torch.nn.utils.rnn.pad_sequence(proteins, batch_first=True, padding_value=1)
    expected = theirs(padded, repr_layers=range(4))["representations"]
    check_every_layer(load(tmp_path / "m.pt"), proteins, [list(expected[layer]) for layer in range(4)])


@torch.inference_mode()
def test_every_layer_equals_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = {"mask_token_id": MASK_TOKEN, "pad_token_id": 1}
    config = EsmConfig(
        **published_config(SPEC), **tokens, emb_layer_norm_before=False, attn_implementation="eager"
    )
    theirs = EsmModel(config, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path)
    proteins = random_proteins()
    # One sequence at a time: in a padded batch, transformers scales masked sequences differently.
    found = [theirs(input_ids=ids[None], output_hidden_states=True).hidden_states for ids in proteins]
    expected = [[states[layer][0] for states in found] for layer in range(4)]
    check_every_layer(load(tmp_path), proteins, expected)
