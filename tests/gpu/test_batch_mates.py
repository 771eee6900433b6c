"""On a GPU too, vectors are bit-identical whatever else is in the batch."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.inference.device import Streams
from virnuc_core.inference.planning import plan_models
from virnuc_core.inference.prefetch import HostBatch
from virnuc_core.inference.runner import ModelRunner
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Precision

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
Rows = npt.NDArray[np.int64]


def ways_of(tokens: TokenColumn) -> dict[str, Rows]:
    """Rows to embed together."""
    rows = np.arange(len(tokens))
    ways = {"opposite order": rows[::-1], "without every other": rows[::2]}
    ways |= {f"{row} alone": rows[row : row + 1] for row in range(10)}
    for most in (256, 512, 1024, 2048, 4096, 8192):
        for begin in range(10):
            end = begin + int(np.searchsorted(np.cumsum(tokens.num_tokens[begin:]), most))
            ways[f"up to {most} tokens from {begin}"] = rows[begin:end]
    return {name: chosen for name, chosen in ways.items() if len(chosen)}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "models", [("random:150M", None), (None, "random:DNABERT-S")], ids=["ESM-2", "DNABERT-S"]
)
def test_the_same_bits_in_any_batch(models: tuple[str | None, str | None], precision: Precision) -> None:
    config = RunConfig(chunk_length=None, precision=precision, esm_model=models[0], dnabert_model=models[1])
    [planned] = plan_models(config, (DEVICE,), None)
    encoder = load_model(open_checkpoint(planned.location, planned.spec.family), DEVICE, planned.precision)
    model = ModelRunner(planned, encoder, Streams(DEVICE))
    draw = np.random.default_rng(0)
    offsets = np.concatenate(([0], np.cumsum(draw.integers(12, 340, 200))))
    tokens = TokenColumn(draw.integers(5, planned.spec.vocab_size - 9, int(offsets[-1]), np.int32), offsets)

    def embed(rows: Rows) -> npt.NDArray[np.float32]:
        """fp32 (n, D): vectors of n rows, packed in this order as in a run."""
        column = tokens.take(rows)
        packing = pack(column.num_tokens, planned.token_budget)
        at_places = torch.empty((len(rows), planned.spec.embedding_dim), device=DEVICE)
        place = 0
        for members in packing.batches:
            batch = column.take(members)
            prepared = HostBatch(torch.from_numpy(batch.input_ids), batch.cu_seqlens, place)
            model.embed(prepared, at_places, str)
            place += len(prepared)
        vectors = np.empty(at_places.shape, np.float32)
        vectors[packing.rows] = at_places.cpu().numpy()
        return vectors

    expected = embed(np.arange(len(tokens)))
    for way, rows in ways_of(tokens).items():
        assert np.array_equal(embed(rows), expected[rows]), way
