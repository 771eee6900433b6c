"""ESM-2 against stored outputs of fair-esm, and against installed fair-esm and transformers."""

from argparse import Namespace
from pathlib import Path

import esm
import numpy as np
import pytest
import torch
from transformers import EsmConfig, EsmModel

from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.encoder import Encoder, mean_pool
from virnuc_core.models.esm2 import MASK_TOKEN
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import AttentionBackend

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "esm2"
LAYERS, WIDTH, HEADS = 3, 48, 3
LENGTHS = [3, 30, 30, 21, 57, 8]


def _load(path: Path) -> Encoder:
    return load_model(open_checkpoint(str(path), "esm2"), "cpu", "fp32")


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("repr_layer", range(5))
@torch.inference_mode()
def test_means_of_every_layer_equal_fair_esm(repr_layer: int, backend: AttentionBackend) -> None:
    model = _load(GOLDEN / "esm2_t4_made.pt")
    with np.load(GOLDEN / "golden.npz") as golden:
        tokens = Esm2Tokenizer().encode(ByteColumn.from_strings(golden["sequences"].tolist()))
        layout = model.build_layout(tokens.offsets.astype(np.int32), backend)
        hidden_states = model(torch.from_numpy(tokens.input_ids), layout, repr_layer)
        means = mean_pool(hidden_states, layout.cu_seqlens, include_special_tokens=model.pools_special_tokens)
        np.testing.assert_allclose(means.numpy(), golden[f"mean_layer{repr_layer}"], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def token_lists() -> list[torch.Tensor]:
    """Random proteins with special tokens; two have masked residues."""
    generator = torch.Generator().manual_seed(3)
    lists = []
    for length in LENGTHS:
        tokens = torch.randint(4, 30, (length,), generator=generator)
        tokens[0], tokens[-1] = 0, 2
        lists.append(tokens)
    lists[1][5:9] = MASK_TOKEN
    lists[4][[1, 30, 55]] = MASK_TOKEN
    return lists


def _hidden_states(model: Encoder, token_lists: list[torch.Tensor], layer: int) -> tuple[torch.Tensor, ...]:
    cu_seqlens = np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int32)
    layout = model.build_layout(cu_seqlens, "sdpa")
    return model(torch.cat(token_lists), layout, layer).split(LENGTHS)


@torch.inference_mode()
def test_every_layer_equals_installed_fair_esm(token_lists: list[torch.Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = esm.model.esm2.ESM2(num_layers=LAYERS, embed_dim=WIDTH, attention_heads=HEADS).eval()
    settings = Namespace(
        encoder_layers=LAYERS, encoder_embed_dim=WIDTH, encoder_attention_heads=HEADS, token_dropout=True
    )
    state = {f"encoder.sentence_encoder.{name}": value for name, value in theirs.state_dict().items()}
    torch.save(
        {"args": Namespace(arch="esm2"), "cfg": {"model": settings}, "model": state}, tmp_path / "m.pt"
    )
    ours = _load(tmp_path / "m.pt")

    padded = torch.nn.utils.rnn.pad_sequence(token_lists, batch_first=True, padding_value=1)
    expected = theirs(padded, repr_layers=range(LAYERS + 1))["representations"]
    for layer in range(LAYERS + 1):
        for row, states in enumerate(_hidden_states(ours, token_lists, layer)):
            torch.testing.assert_close(states, expected[layer][row, : LENGTHS[row]], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_every_layer_equals_transformers(token_lists: list[torch.Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = EsmConfig(
        vocab_size=33,
        mask_token_id=MASK_TOKEN,
        pad_token_id=1,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        layer_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = EsmModel(config, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path)
    ours = _load(tmp_path)

    # One sequence at a time: in a padded batch, transformers scales masked sequences differently.
    expected = [
        theirs(input_ids=tokens[None], output_hidden_states=True).hidden_states for tokens in token_lists
    ]
    for layer in range(LAYERS + 1):
        for row, states in enumerate(_hidden_states(ours, token_lists, layer)):
            torch.testing.assert_close(states, expected[row][layer][0], rtol=0, atol=1e-5)
