"""ESM-2 on the CPU: virnuc against fair-esm and transformers, in one run on the same cores.

Random weights of the 8M architecture, proteins of one length, token ids in and mean vectors out. All contenders
take turns in every round, so that other load on the machine affects them alike; each peer is quoted at its best
batch size. The GEMM floors are only the model's matrix products, by torch's default path (MKL) and by oneDNN.

    python -m benchmarks.cpu_speed [--rounds 30] [--threads 2] [--length 166]
"""

import argparse
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn import functional

from benchmarks.peers import fair_esm_model, hugging_face_model
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.benchmark.forward import gemm_shapes
from virnuc_core.inference.device import cpu_has_bf16, default_token_budget
from virnuc_core.models.encoder import mean_pool
from virnuc_core.models.esm2 import ESM2
from virnuc_core.models.hub import open_checkpoint

SPEC = open_checkpoint("random:8M", "esm2").spec
NUM_PROTEINS = 24
PEER_BATCHES = (1, 2, 4, 8, 24)
TOKEN_BUDGETS = (1024, 2048, 4096)
RESULT = Path(__file__).parent / "results" / "cpu_speed.json"

Contender = Callable[[], object]


def virnuc(tokens: TokenColumn, token_budget: int, dtype: torch.dtype) -> Contender:
    """Packing, forward and pooling of all proteins, as in a run."""
    model = ESM2(SPEC).eval().to(dtype)

    def run() -> list[torch.Tensor]:
        vectors = []
        for rows in pack(tokens.num_tokens, token_budget).batches:
            batch = tokens.take(rows)
            layout = model.build_layout(batch.cu_seqlens, "sdpa")
            hidden_states = model(torch.from_numpy(batch.input_ids), layout)
            vectors.append(mean_pool(hidden_states, layout.cu_seqlens, include_special_tokens=False))
        return vectors

    return run


def fair_esm(ids: torch.Tensor, batch: int) -> Contender:
    """fair-esm's own model class, `batch` proteins at a time."""
    model, layers = fair_esm_model(SPEC, "cpu"), SPEC.num_layers

    def run() -> list[torch.Tensor]:
        states = [model(part, repr_layers=[layers])["representations"][layers] for part in ids.split(batch)]
        return [part[:, 1:-1].mean(1) for part in states]

    return run


def hugging_face(ids: torch.Tensor, batch: int) -> Contender:
    """EsmModel of transformers with its default (SDPA) attention, `batch` proteins at a time."""
    model = hugging_face_model(SPEC, "cpu")

    def run() -> list[torch.Tensor]:
        states = [model(input_ids=part).last_hidden_state for part in ids.split(batch)]
        return [part[:, 1:-1].mean(1) for part in states]

    return run


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
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 24, (NUM_PROTEINS, length + 2), dtype=np.int32)
    ids[:, 0], ids[:, -1] = 0, 2
    tokens = TokenColumn(ids.ravel(), np.arange(NUM_PROTEINS + 1, dtype=np.int64) * (length + 2))
    padded = torch.from_numpy(ids).long()
    everything: dict[str, Contender] = {}
    for budget in TOKEN_BUDGETS:
        everything[f"virnuc fp32, budget {budget}"] = virnuc(tokens, budget, torch.float32)
    if cpu_has_bf16():
        budget = default_token_budget(SPEC, "bf16", "cpu")
        everything[f"virnuc bf16, budget {budget}"] = virnuc(tokens, budget, torch.bfloat16)
    for batch in PEER_BATCHES:
        everything[f"fair-esm fp32, batch {batch}"] = fair_esm(padded, batch)
        everything[f"transformers fp32, batch {batch}"] = hugging_face(padded, batch)
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


def summarise(figures: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Speedup of virnuc at its default budget over each peer at its best batch, by median and best round."""
    ours = figures[f"virnuc fp32, budget {default_token_budget(SPEC, 'fp32', 'cpu')}"]
    return {
        statistic: {
            peer: round(
                ours[statistic] / max(f[statistic] for name, f in figures.items() if name.startswith(peer)), 2
            )
            for peer in ("fair-esm", "transformers", "GEMM floor, torch default", "GEMM floor, oneDNN")
        }
        for statistic in ("median", "best")
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=166)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    figures = measure(contenders(arguments.length), arguments.rounds, NUM_PROTEINS * arguments.length)
    ratios = summarise(figures)
    for name, figure in figures.items():
        print(f"{name:32s} median {figure['median']:7,d}   best {figure['best']:7,d} residues/s")
    for statistic, ratio in ratios.items():
        print(f"virnuc fp32 over ({statistic}): " + ", ".join(f"{k} {v:.2f}" for k, v in ratio.items()))
    result = {
        "command": "python -m benchmarks.cpu_speed " + " ".join(sys.argv[1:]),
        "model": "ESM-2 8M, random weights",
        "length": arguments.length,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "residues_per_second": figures,
        "virnuc_fp32_over": ratios,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
