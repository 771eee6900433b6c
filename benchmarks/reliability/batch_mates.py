"""Whether the vector of a sequence depends on what else is in its batch, to the last bit.

    python -m benchmarks.reliability.batch_mates [--model esm2:tiny ...] [--precision fp32,...] [--device cpu] [--number 300]

The same sequences are embedded packed as a run packs them, in the opposite order, without every other one, a few of them one
at a time, and some in small batches; then the vectors are compared bit by bit.
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
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.benchmark.synthetic import random_tokens
from virnuc_core.inference.device import Streams
from virnuc_core.inference.plan import PlannedModel
from virnuc_core.inference.planning import plan_models
from virnuc_core.inference.prefetch import HostBatch
from virnuc_core.inference.runner import ModelRunner
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.hub import family_of, open_checkpoint
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Precision

_SHORTEST, _LONGEST = 12, 340
_FEW: Final = 10
_SMALL_BATCHES: Final = (256, 512, 1024, 2048, 4096, 8192)

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


def embed(
    model: ModelRunner, streams: Streams, tokens: TokenColumn, rows: Int64, planned: PlannedModel
) -> Float32:
    """fp32 (n, D): vectors of n rows, packed in this order as in a run."""
    column = tokens.take(rows)
    packing = pack(column.num_tokens, planned.token_budget, padded=planned.attention == "padded")
    at_places = torch.empty((len(rows), planned.spec.embedding_dim), device=streams.device)
    place = 0
    for members in packing.batches:
        batch = column.take(members)
        prepared = HostBatch(torch.from_numpy(batch.input_ids), batch.cu_seqlens, place)
        model.embed(prepared, at_places, str)
        place += len(prepared)
    vectors = np.empty(at_places.shape, np.float32)
    vectors[packing.rows] = at_places.cpu().numpy()
    return vectors


def measure(name: str, precision: Precision, device: str, number: int) -> dict[str, Any]:
    """For one model and precision, how many vectors differ per way of packing, and by how much."""
    family, model_name = family_of(name)
    config = RunConfig(
        chunk_length=None,
        precision=precision,
        esm_model=model_name if family == "esm2" else None,
        dnabert_model=model_name if family == "dnabert_s" else None,
    )
    [planned] = plan_models(config, (device,), None)
    streams = Streams(device)
    encoder = load_model(open_checkpoint(planned.location, family), device, planned.precision)
    model = ModelRunner(planned, encoder, streams)
    draw = np.random.default_rng(0)
    tokens = random_tokens(encoder.spec, draw.integers(_SHORTEST, _LONGEST, number), draw)
    everything = np.arange(number)
    expected = embed(model, streams, tokens, everything, planned)
    found: dict[str, dict[str, float]] = {}
    for way, rows in _ways(tokens):
        vectors = embed(model, streams, tokens, rows, planned)
        other = ~(vectors == expected[rows]).all(axis=1)
        sums = found.setdefault(way, {"sequences": 0, "other": 0, "largest_difference": 0.0})
        sums["sequences"] += len(rows)
        sums["other"] += int(other.sum())
        difference = float(np.abs(vectors - expected[rows]).max())
        sums["largest_difference"] = max(sums["largest_difference"], difference)
    return {
        "model": name,
        "precision": planned.precision,
        "attention": planned.attention,
        "device": torch.cuda.get_device_name(device) if device != "cpu" else "CPU",
        "ways": found,
    }


def _ways(tokens: TokenColumn) -> list[tuple[str, Int64]]:
    """Rows to embed together, by name."""
    everything = np.arange(len(tokens))
    ways = [("opposite order", everything[::-1]), ("without every other", everything[::2])]
    ways += [("one at a time", everything[row : row + 1]) for row in range(_FEW)]
    for most in _SMALL_BATCHES:
        for begin in range(_FEW):
            end = begin + int(np.searchsorted(np.cumsum(tokens.num_tokens[begin:]), most))
            ways.append((f"up to {most} tokens", everything[begin:end]))
    return [(name, rows) for name, rows in ways if len(rows)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="several are measured in turn [the two that are bundled]"
    )
    parser.add_argument("--precision", default="fp32", metavar="P,P,...")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--number", type=int, default=300, help="sequences")
    out = Path(__file__).parents[1] / "results" / "reliability" / "batch_mates.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args(argv)
    cases = [
        measure(model, precision, arguments.device, arguments.number)
        for model in arguments.model or ["esm2:tiny", "dnabert:tiny"]
        for precision in arguments.precision.split(",")
    ]
    print_and_write({"kind": "batch_mates", "cases": cases}, arguments.out)
    return 1 if any(way["other"] for case in cases for way in case["ways"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
