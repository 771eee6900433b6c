"""The bundled models in other programs: they load there and give the same numbers."""

import numpy as np
import torch
import transformers

from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.hub import open_checkpoint


def test_transformers_gives_the_same_hidden_states() -> None:
    checkpoint = open_checkpoint("tiny", "esm2")
    theirs = transformers.EsmModel.from_pretrained(
        checkpoint.location, add_pooling_layer=False, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ours = load_model(checkpoint, "cpu", "fp32")
    tokens = Esm2Tokenizer().encode(ByteColumn.from_strings(["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"]))
    ids = torch.from_numpy(tokens.input_ids.astype(np.int64))
    layout = ours.build_layout(np.array([0, len(ids)], np.int32), "reference")
    with torch.inference_mode():
        expected = theirs(input_ids=ids[None]).last_hidden_state[0]
        torch.testing.assert_close(ours(ids, layout), expected, atol=1e-5, rtol=1e-5)
