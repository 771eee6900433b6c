"""ESM-2 on the CPU: virnuc against fair-esm and transformers, in one run on the same cores.

Random weights of the 8M architecture, proteins of one length, token ids in and mean vectors out. All contenders
take turns in every round, so that other load on the machine affects them alike; each peer is quoted at its best
batch size. The GEMM floors are only the model's matrix products, by torch's default path (MKL) and by oneDNN.

    python -m benchmarks.cpu_speed [--rounds 30] [--threads 2] [--length 166]
"""

import logging
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from benchmarks.peers import fair_esm_model, hugging_face_model
from benchmarks.reports import Json, command_of, options_of, write_report
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.benchmark.forward import gemm_shapes
from virnuc_core.inference.device import cpu_has_bf16, default_token_budget
from virnuc_core.models.encoder import mean_pool
from virnuc_core.models.esm2 import ESM2
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.models.onednn import pack_layers

SPEC = open_checkpoint("random:8M", "esm2").spec
NUM_PROTEINS = 24
PEER_BATCHES = (1, 2, 4, 8, 24)
TOKEN_BUDGETS = (1024, 2048, 4096)

Contender = Callable[[], object]


def virnuc(tokens: TokenColumn, token_budget: int, dtype: torch.dtype) -> Contender:
    """Packing, forward and pooling of all proteins, as in a run."""
    model = ESM2(SPEC).requires_grad_(False).eval().to(dtype)
    pack_layers(model)

    def run() -> list[Tensor]:
        vectors = []
        for rows in pack(tokens.num_tokens, token_budget).batches:
            batch = tokens.take(rows)
            layout = model.build_layout(batch.cu_seqlens, "sdpa")
            hidden_states = model(torch.from_numpy(batch.input_ids), layout)
            vectors.append(mean_pool(hidden_states, layout.cu_seqlens, include_special_tokens=False))
        return vectors

    return run


def peer(forward: Callable[[Tensor], Tensor], ids: Tensor, batch: int) -> Contender:
    """A model from ids (B, T) to hidden states (B, T, D), `batch` proteins at a time."""
    return lambda: [forward(part)[:, 1:-1].mean(1) for part in ids.split(batch)]


def gemm_floor(num_tokens: int, *, onednn: bool) -> Contender:
    """The matrix products of all layers over `num_tokens` tokens."""
    products = [(torch.randn(num_tokens, k), torch.randn(n, k), torch.randn(n)) for k, n in gemm_shapes(SPEC)]

    def run() -> None:
        for _ in range(SPEC.num_layers):
            for x, weight, bias in products:
                if onednn:
                    torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
                else:
                    functional.linear(x, weight, bias)

    return run


def contenders(length: int) -> dict[str, Contender]:
    """All contenders, each over the same number of proteins of `length` residues."""
    ids = np.random.default_rng(0).integers(4, 24, (NUM_PROTEINS, length + 2), dtype=np.int32)
    ids[:, 0], ids[:, -1] = 0, 2
    tokens = TokenColumn(ids.ravel(), np.arange(NUM_PROTEINS + 1, dtype=np.int64) * (length + 2))
    padded, last = torch.from_numpy(ids).long(), SPEC.num_layers
    fair_esm, hugging_face = fair_esm_model(SPEC, "cpu"), hugging_face_model(SPEC, "cpu")
    everything: dict[str, Contender] = {}
    for budget in TOKEN_BUDGETS:
        everything[f"virnuc fp32, budget {budget}"] = virnuc(tokens, budget, torch.float32)
    if cpu_has_bf16():
        budget = default_token_budget(SPEC, "bf16", "cpu")
        everything[f"virnuc bf16, budget {budget}"] = virnuc(tokens, budget, torch.bfloat16)
    for batch in PEER_BATCHES:
        everything[f"fair-esm fp32, batch {batch}"] = peer(
            lambda part: fair_esm(part, repr_layers=[last])["representations"][last], padded, batch
        )
        everything[f"transformers fp32, batch {batch}"] = peer(
            lambda part: hugging_face(input_ids=part).last_hidden_state, padded, batch
        )
    everything["GEMM floor, torch default"] = gemm_floor(ids.size, onednn=False)
    everything["GEMM floor, oneDNN"] = gemm_floor(ids.size, onednn=True)
    return everything


def measure(runs: dict[str, Contender], rounds: int, residues: int) -> dict[str, dict[str, int]]:
    """Median and best residues/s of each contender."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if turn > 0:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
    return {
        name: {"median": round(residues / statistics.median(taken)), "best": round(residues / min(taken))}
        for name, taken in seconds.items()
    }


def ratio(speeds: dict[str, dict[str, int]], statistic: str, contender: str) -> float:
    """Speedup of virnuc at its default budget over a contender at its best batch."""
    own = speeds[f"virnuc fp32, budget {default_token_budget(SPEC, 'fp32', 'cpu')}"][statistic]
    best = max(speed[statistic] for name, speed in speeds.items() if name.startswith(contender))
    return round(own / best, 2)


def main() -> None:
    """Command line."""
    parser = options_of("cpu_speed", __doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=166)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    speeds = measure(contenders(arguments.length), arguments.rounds, NUM_PROTEINS * arguments.length)
    for name, speed in speeds.items():
        print(f"{name:32s} median {speed['median']:7,d}   best {speed['best']:7,d} residues/s")
    others = ("fair-esm", "transformers", "GEMM floor, torch default", "GEMM floor, oneDNN")
    ratios = {
        statistic: {other: ratio(speeds, statistic, other) for other in others}
        for statistic in ("median", "best")
    }
    for statistic, values in ratios.items():
        print(f"virnuc fp32 over ({statistic}): " + ", ".join(f"{k} {v:.2f}" for k, v in values.items()))
    report: Json = {
        "command": command_of("cpu_speed"),
        "model": "ESM-2 8M, random weights",
        "length": arguments.length,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "residues_per_second": speeds,
        "virnuc_fp32_over": ratios,
    }
    write_report(report, arguments.out)


if __name__ == "__main__":
    main()
