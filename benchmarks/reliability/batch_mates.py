"""Whether the vector of a sequence depends on what else is in its batch, to the last bit.

    python -m benchmarks.reliability.batch_mates [--model esm2:tiny ...] [--precision fp32,...] [--device cpu] [--number 300]

The same sequences are embedded packed as a run packs them, in the opposite order, without every other one, a few of them one
at a time, and some in small batches; then the vectors are compared bit by bit.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.reliability.harness import main, program
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.benchmark.synthetic import random_tokens
from virnuc_core.inference.device import Streams
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


def ways_of(tokens: TokenColumn) -> list[tuple[str, Int64]]:
    """Rows to embed together, by name."""
    everything = np.arange(len(tokens))
    ways = [("opposite order", everything[::-1]), ("without every other", everything[::2])]
    ways += [("one at a time", everything[row : row + 1]) for row in range(_FEW)]
    for most in _SMALL_BATCHES:
        for begin in range(_FEW):
            end = begin + int(np.searchsorted(np.cumsum(tokens.num_tokens[begin:]), most))
            ways.append((f"up to {most} tokens", everything[begin:end]))
    return [(name, rows) for name, rows in ways if len(rows)]


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

    def embed(rows: Int64) -> Float32:
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

    expected = embed(np.arange(number))
    found: dict[str, dict[str, float]] = {}
    for way, rows in ways_of(tokens):
        vectors = embed(rows)
        sums = found.setdefault(way, {"sequences": 0, "other": 0, "largest_difference": 0.0})
        sums["sequences"] += len(rows)
        sums["other"] += int((vectors != expected[rows]).any(axis=1).sum())
        difference = float(np.abs(vectors - expected[rows]).max())
        sums["largest_difference"] = max(sums["largest_difference"], difference)
    return {
        "model": name,
        "precision": planned.precision,
        "attention": planned.attention,
        "device": torch.cuda.get_device_name(device) if device != "cpu" else "CPU",
        "ways": found,
    }


def measure_all(
    scratch: Path, model: list[str] | None, precision: str, device: str, number: int
) -> dict[str, Any]:
    """The cases, and those with another bit."""
    models = model or ["esm2:tiny", "dnabert:tiny"]
    precisions: list[Any] = precision.split(",")
    cases = [measure(name, precision, device, number) for name in models for precision in precisions]
    failures = [case for case in cases if any(way["other"] for way in case["ways"].values())]
    return {"cases": cases, "failures": [f"{case['model']} {case['precision']}" for case in failures]}


if __name__ == "__main__":
    parser = program(__doc__, "batch_mates")
    parser.add_argument(
        "--model", action="append", help="several are measured in turn [the two that are bundled]"
    )
    parser.add_argument("--precision", default="fp32", metavar="P,P,...")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--number", type=int, default=300, help="sequences")
    main(parser, measure_all)
