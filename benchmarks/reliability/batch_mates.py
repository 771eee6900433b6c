"""Whether the vector of a sequence depends on what else is in its batch, to the last bit.

    python -m benchmarks.reliability.batch_mates [--model random:8M ...] [--precision fp32,...] [--device cpu] [--number 300]

The same sequences are embedded packed as a run packs them, in the opposite order, every other one alone, with half of the
token budget, and a few of them one at a time; then the vectors are compared bit by bit.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.reports import print_and_write
from virnuc_core.batching.packed_batch import TokenColumn
from virnuc_core.batching.packing import iter_batches, pack
from virnuc_core.benchmark.made_sequences import random_tokens
from virnuc_core.inference.model_planning import plan_models
from virnuc_core.models.checkpoints import family_of, resolve_checkpoint
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.loading import load_model
from virnuc_core.run_plan import PlannedModel
from virnuc_core.specs import Precision, RunConfig

_SHORTEST, _LONGEST = 12, 340
_ONE_AT_A_TIME: Final = 10

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@torch.inference_mode()
def embed(
    model: Encoder, planned: PlannedModel, tokens: TokenColumn, rows: Int64, budget: int, device: str
) -> Float32:
    """fp32 (n, D): the vectors of n rows, packed in this order."""
    lengths = tokens.num_tokens[rows]
    starts = tokens.offsets[rows]
    ids = np.concatenate([tokens.input_ids[s : s + n] for s, n in zip(starts, lengths, strict=True)])
    column = TokenColumn(ids, np.concatenate(([0], np.cumsum(lengths))))
    vectors = np.empty((len(rows), planned.spec.embedding_dim), np.float32)
    packing = pack(lengths, budget, padded=planned.attention == "padded")
    for batch in iter_batches(column, packing):
        layout = model.build_layout(batch.cu_seqlens, planned.attention)
        input_ids = torch.from_numpy(batch.input_ids).to(device)
        vectors[batch.rows] = model.embed(input_ids, layout, planned.repr_layer).cpu().numpy()
    return vectors


def measure(name: str, precision: Precision, device: str, number: int) -> dict[str, Any]:
    """One model in one precision: for each way of packing, how many vectors are others, and by how much."""
    family, model_name = family_of(name)
    names = {
        "esm_model": None,
        "dnabert_model": None,
        f"{family.removesuffix('2').removesuffix('_s')}_model": model_name,
    }
    config = RunConfig(chunk_length=None, precision=precision, **names)
    [planned] = plan_models(config, (device,), None)
    model, spec = load_model(resolve_checkpoint(planned.location, family), device, planned.precision)
    draw = np.random.default_rng(0)
    tokens = random_tokens(spec, draw.integers(_SHORTEST, _LONGEST, number), draw)
    budget = planned.token_budget
    everything = np.arange(number)
    expected = embed(model, planned, tokens, everything, budget, device)
    ways = {
        "opposite order": (everything[::-1], budget),
        "every other sequence": (everything[::2], budget),
        "half the token budget": (everything, budget // 2),
    }
    ways |= {f"sequence {row} alone": (everything[row : row + 1], budget) for row in range(_ONE_AT_A_TIME)}
    found: dict[str, dict[str, float]] = {}
    for way, (rows, tokens_at_once) in ways.items():
        vectors = embed(model, planned, tokens, rows, tokens_at_once, device)
        other = ~(vectors == expected[rows]).all(axis=1)
        key = "one at a time" if way.endswith("alone") else way
        sums = found.setdefault(key, {"sequences": 0, "other": 0, "largest_difference": 0.0})
        sums["sequences"] += len(rows)
        sums["other"] += int(other.sum())
        difference = float(np.abs(vectors - expected[rows]).max())
        sums["largest_difference"] = max(sums["largest_difference"], difference)
    return {
        "model": name,
        "precision": planned.precision,
        "attention": planned.attention,
        "device": device,
        "ways": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--number", type=int, default=300, help="sequences")
    out = Path(__file__).parents[1] / "results" / "reliability_batch_mates.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args(argv)
    models = arguments.model or ["random:8M", "random:DNABERT-S"]
    cases = [
        measure(model, precision, arguments.device, arguments.number)
        for model in models
        for precision in arguments.precision.split(",")
    ]
    print_and_write({"kind": "batch_mates", "cases": cases}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
