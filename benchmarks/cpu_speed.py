"""ESM-2 on the CPU: virnuc against fair-esm, transformers, ONNX Runtime and esm-cpp, in one run on the same cores.

Random weights of one architecture, proteins of one length, token ids in and mean vectors out (esm-cpp gives logits).
All contenders take turns in every round, so that other load on the machine affects them alike; each peer is quoted at
its best batch size. The GEMM floors are only the model's matrix products, by torch's default path (MKL) and by oneDNN.
A peer that is not installed (`pip install onnx onnxruntime`; `pip install --no-deps esm-cpp`) is left out.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu_speed [--model 8M] [--rounds 30] [--threads 2] [--length 166]

esm-cpp takes the number of threads from OMP_NUM_THREADS.
"""

import importlib.metadata
import importlib.util
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import fair_esm_model, hugging_face_model
from benchmarks.reports import Json, command_of, options_of, write_report
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.benchmark.forward import gemm_shapes
from virnuc_core.inference.device import cpu_has_bf16, cpu_has_int8, default_token_budget
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import ModelSpec, ResolvedPrecision

NUM_PROTEINS = 24
PEER_BATCHES = (1, 2, 4, 8, 24)
TOKEN_BUDGETS = (1024, 2048, 4096)
DEFAULT_BUDGET = default_token_budget(open_checkpoint("random:8M", "esm2").spec, "fp32", "cpu")

Contender = Callable[[], object]


def virnuc(name: str, tokens: TokenColumn, token_budget: int, precision: ResolvedPrecision) -> Contender:
    """Packing, forward and pooling of all proteins, as in a run."""
    model = load_model(open_checkpoint(f"random:{name}", "esm2"), "cpu", precision)

    def run() -> list[Tensor]:
        vectors = []
        for rows in pack(tokens.num_tokens, token_budget).batches:
            batch = tokens.take(rows)
            layout = model.build_layout(batch.cu_seqlens, "sdpa")
            vectors.append(model.embed(torch.from_numpy(batch.input_ids), layout))
        return vectors

    return run


def peer(forward: Callable[[Tensor], Tensor], ids: Tensor, batch: int) -> Contender:
    """A model from ids (B, T) to hidden states (B, T, D), `batch` proteins at a time."""
    return lambda: [forward(part)[:, 1:-1].mean(1) for part in ids.split(batch)]


def onnx_runtime(model: nn.Module, ids: Tensor, threads: int, folder: Path) -> Callable[[Tensor], Tensor]:
    """The model of transformers in ONNX Runtime, for any number of proteins as long as `ids` (B, T)."""
    import onnxruntime

    class HiddenStates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor) -> Tensor:
            states: Tensor = self.model(input_ids=input_ids).last_hidden_state
            return states

    axes = {"input_ids": {0: "proteins"}, "states": {0: "proteins"}}
    names: dict[str, Any] = {"input_names": ["input_ids"], "output_names": ["states"], "dynamic_axes": axes}
    path = str(folder / "model.onnx")
    torch.onnx.export(HiddenStates().eval(), (ids[:2],), path, dynamo=False, opset_version=17, **names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    return lambda part: torch.from_numpy(session.run(None, {"input_ids": part.numpy()})[0])


def esm_cpp_models(spec: ModelSpec, model: Any, ids: npt.NDArray[np.int32], folder: Path) -> dict[str, Any]:
    """esm-cpp's model in fp32, and in int8 with SmoothQuant calibrated on some of these proteins."""
    import esm_cpp

    masked: Any = transformers.EsmForMaskedLM(model.config)
    masked.esm.load_state_dict(model.state_dict(), strict=False)
    # esm-cpp asks for the tensors of the published files, also for those that transformers derives.
    frequencies = 1 / 10000 ** (torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    layers = [f"esm.encoder.layer.{n}.attention.self" for n in range(spec.num_layers)]
    derived = {f"{layer}.rotary_embeddings.inv_freq": frequencies for layer in layers}
    tensors = {"lm_head.decoder.bias": masked.lm_head.bias} | masked.state_dict() | derived
    path = str(folder / "model.safetensors")
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, path)
    exact, quantized = (esm_cpp.Model.load_from_safetensors(path) for _ in range(2))
    observer = esm_cpp.ActivationObserver()
    for row in ids[:4]:
        quantized.forward_with_observer(row, np.ones_like(row), observer)
    quantized.apply_smoothquant(observer.percentile(99.9), 0.5)
    quantized.quantize_weights()
    return {"fp32": exact, "int8": quantized}


def gemm_floor(spec: ModelSpec, num_tokens: int, *, onednn: bool) -> Contender:
    """The matrix products of all layers over `num_tokens` tokens."""
    products = [(torch.randn(num_tokens, k), torch.randn(n, k), torch.randn(n)) for k, n in gemm_shapes(spec)]

    def run() -> None:
        for _ in range(spec.num_layers):
            for x, weight, bias in products:
                if onednn:
                    torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
                else:
                    functional.linear(x, weight, bias)

    return run


def contenders(name: str, length: int, threads: int, folder: Path) -> Iterator[tuple[str, Contender]]:
    """All contenders, each over the same number of proteins of `length` residues."""
    spec = open_checkpoint(f"random:{name}", "esm2").spec
    ids = np.random.default_rng(0).integers(4, 24, (NUM_PROTEINS, length + 2), dtype=np.int32)
    ids[:, 0], ids[:, -1] = 0, 2
    tokens = TokenColumn(ids.ravel(), np.arange(NUM_PROTEINS + 1, dtype=np.int64) * (length + 2))
    padded, last = torch.from_numpy(ids).long(), spec.num_layers
    fair_esm, hugging_face = fair_esm_model(spec, "cpu"), hugging_face_model(spec, "cpu")
    for budget in TOKEN_BUDGETS:
        yield f"virnuc fp32, budget {budget}", virnuc(name, tokens, budget, "fp32")
    low: dict[ResolvedPrecision, bool] = {"bf16": cpu_has_bf16(), "int8": cpu_has_int8()}
    for precision in (precision for precision, is_there in low.items() if is_there):
        budget = default_token_budget(spec, precision, "cpu")
        yield f"virnuc {precision}, budget {budget}", virnuc(name, tokens, budget, precision)
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "fair-esm fp32": lambda part: fair_esm(part, repr_layers=[last])["representations"][last],
        "transformers fp32": lambda part: hugging_face(input_ids=part).last_hidden_state,
    }
    if all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))):
        forwards["ONNX Runtime fp32"] = onnx_runtime(hugging_face, padded, threads, folder)
    for peer_name, forward in forwards.items():
        for batch in PEER_BATCHES:
            yield f"{peer_name}, batch {batch}", peer(forward, padded, batch)
    if importlib.util.find_spec("esm_cpp") is not None:
        for dtype, model in esm_cpp_models(spec, hugging_face, ids, folder).items():
            for batch in PEER_BATCHES:
                yield f"esm-cpp {dtype}, batch {batch}", logits(model, ids, batch)
    yield "GEMM floor, torch default", gemm_floor(spec, ids.size, onednn=False)
    yield "GEMM floor, oneDNN", gemm_floor(spec, ids.size, onednn=True)


def logits(model: Any, ids: npt.NDArray[np.int32], batch: int) -> Contender:
    """A model of esm-cpp, `batch` packed proteins at a time."""
    parts = [list(ids[begin : begin + batch]) for begin in range(0, len(ids), batch)]
    return lambda: [model.forward_scheduled(part) for part in parts]


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


def ratios(speeds: dict[str, dict[str, int]], statistic: str) -> dict[str, dict[str, float]]:
    """Speedup of virnuc at its default budget, in each precision, over each peer at its best batch."""
    own: dict[str, int] = {}
    others: dict[str, int] = {}
    for name, speed in speeds.items():
        who, _, where = name.partition(", ")
        if not who.startswith("virnuc"):
            key = name if where in ("oneDNN", "torch default") else who
            others[key] = max(others.get(key, 0), speed[statistic])
        elif where == f"budget {DEFAULT_BUDGET}":
            own[who] = speed[statistic]
    return {who: {name: round(mine / best, 2) for name, best in others.items()} for who, mine in own.items()}


def main() -> None:
    """Command line."""
    parser = options_of("cpu_speed", __doc__)
    parser.add_argument("--model", default="8M")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=166)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        runs = dict(contenders(arguments.model, arguments.length, arguments.threads, Path(folder)))
        speeds = measure(runs, arguments.rounds, NUM_PROTEINS * arguments.length)
    for name, speed in speeds.items():
        print(f"{name:32s} median {speed['median']:7,d}   best {speed['best']:7,d} residues/s")
    over = {statistic: ratios(speeds, statistic) for statistic in ("median", "best")}
    for statistic, of_each in over.items():
        for who, values in of_each.items():
            print(f"{who} over ({statistic}): " + ", ".join(f"{k} {v:.2f}" for k, v in values.items()))
    packages = ("torch", "transformers", "fair-esm", "onnxruntime", "esm-cpp")
    report: Json = {
        "command": command_of("cpu_speed"),
        "model": f"ESM-2 {arguments.model}, random weights",
        "length": arguments.length,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "versions": {name: version for name in packages if (version := installed_version(name))},
        "residues_per_second": speeds,
        "over": over,
    }
    write_report(report, arguments.out)


def installed_version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
