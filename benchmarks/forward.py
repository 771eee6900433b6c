"""Speed of models: forward passes against their own matrix products, and from stored sequences to shards.

    python -m benchmarks.forward --model random:650M --precision fp16,fp8 --lengths fixed:166,lognormal --out FILE.json
    python -m benchmarks.forward --model random:3B --precision fp16 --devices 0,1 --end-to-end 20

`random:NAME` is an architecture with random weights: the same speed and memory, nothing to download. The floor is the
model's matrix products back to back, each by what computes it fastest, on values of realistic size; it is measured in turn
with the forward passes. TFLOP/s count matrix products alone. Needs virnuc_core alone.
"""

import argparse
import gc
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.reports import Json, command_of, options_of, write_report
from virnuc_core import __version__
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.env_config import physical_gpu
from virnuc_core.errors import VirnucError
from virnuc_core.inference.device import resolve_devices, resolve_precision
from virnuc_core.inference.events import GpuSample, LaneEvent, LaneReport, ModelsLoaded
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import PlannedModel, write_plan
from virnuc_core.inference.planning import make_plan, plan_models
from virnuc_core.inference.shard import sum_counters
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.hub import family_of, open_checkpoint
from virnuc_core.models.kernels import has_quack
from virnuc_core.models.layers import OnednnLinear, can_pack
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Alphabet, AttentionChoice, Family, ModelSpec, ResolvedPrecision
from virnuc_core.versions import installed_version

Int64 = npt.NDArray[np.int64]

NUM_BATCHES = 8
FILL, MIN_FILL = 0.99, 0.5  # first-fit may leave the last batch nearly empty, which is then left out
MAX_IN_FLIGHT = 3  # as in a run: the device never waits for the host, and memory stays bounded
COPIES = 4  # of each weight, used in turn so that none stays in L2 from one layer to the next
WEIGHT_STD = 0.02
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Dense TFLOP/s in the data sheets of GPUs whose names begin so.
PEAK_TFLOPS, PEAK_GPUS = {"fp16": 989, "bf16": 989, "fp8": 1979}, ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
PROBE_SECONDS = 0.2  # of a candidate for the floor
POWER_SECONDS = 0.25  # between samples
USUAL_LENGTHS: dict[Family, str] = {"esm2": "fixed:166", "dnabert_s": "fixed:500"}
LETTERS: dict[Family, bytes] = {"esm2": b"LAGVSERTIDPKQNFYMHWC", "dnabert_s": b"ACGT"}


def draw_lengths(lengths: str, count: int, rng: np.random.Generator) -> Int64:
    """int64 (count,) of `fixed:N` or of `lognormal`: as UniRef's proteins, clipped to what ESM-2 saw."""
    if lengths == "lognormal":
        return np.clip(rng.lognormal(5.6, 0.7, count), 30, 1022).astype(np.int64)
    return np.full(count, int(lengths.partition(":")[2]), np.int64)


def random_sequences(family: Family, lengths: Int64, rng: np.random.Generator) -> ByteColumn:
    """Proteins of the 20 residues, or DNA, of the given lengths."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return ByteColumn(rng.choice(np.frombuffer(LETTERS[family], np.uint8), int(offsets[-1])), offsets)


def write_fasta(path: Path, sequences: ByteColumn) -> None:
    with path.open("w") as file:
        file.writelines(f">s{number}\n{text}\n" for number, text in enumerate(sequences.to_strings()))


def rounds_per_second(steps: Sequence[Callable[[], object]], seconds: float, device: str) -> float:
    """Complete rounds of `steps` per second over at least `seconds`."""
    events: deque[torch.cuda.Event] = deque()
    synchronize(device)
    started = time.perf_counter()
    rounds = 0
    while time.perf_counter() - started < seconds:
        for step in steps:
            step()
            if device != "cpu":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                events.append(event)
            if len(events) > MAX_IN_FLIGHT:
                events.popleft().synchronize()
        rounds += 1
    synchronize(device)
    return rounds / (time.perf_counter() - started)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def gemm_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    width, ffn = spec.embedding_dim, spec.ffn_dim
    inner = ffn if spec.family == "esm2" else 2 * ffn
    return (width, 3 * width), (width, width), (width, inner), (ffn, width)


def flops_per_token(spec: ModelSpec) -> int:
    return 2 * spec.num_layers * sum(inputs * outputs for inputs, outputs in gemm_shapes(spec))


Gemms = list[Callable[[], object]]  # one for each copy of the weights


def gemm_floor(
    spec: ModelSpec, precision: ResolvedPrecision, num_tokens: int, device: str
) -> tuple[Callable[[], None], list[str]]:
    """A function that launches the matrix products of a whole forward pass over `num_tokens` tokens.

    Also returns what computes each product of a layer.
    """
    names, per_shape = [], []
    for shape in gemm_shapes(spec):
        sizes = (num_tokens, *shape)
        found = (
            _fp8_gemms(*sizes, device) if precision == "fp8" else _gemms(*sizes, device, DTYPES[precision])
        )
        if precision != "fp32" and has_quack(torch.device(device)):
            found["QuACK"] = _quack_gemms(*sizes, device, precision)
        rates = {}
        for name, gemms in found.items():
            gemms[0]()  # compiles it
            rates[name] = rounds_per_second(gemms, PROBE_SECONDS, device)
        names.append(max(rates, key=rates.__getitem__))
        per_shape.append(found[names[-1]])
    layers = cycle(list(zip(*per_shape, strict=True)))

    def launch() -> None:
        for gemm in chain.from_iterable(islice(layers, spec.num_layers)):
            gemm()

    return launch, names


def _gemms(num_tokens: int, inputs: int, outputs: int, device: str, dtype: torch.dtype) -> dict[str, Gemms]:
    """X W^T + b for each copy of W; by oneDNN on the CPU, as in the models."""
    x = torch.randn((num_tokens, inputs), device=device, dtype=dtype)
    layers = [nn.Linear(inputs, outputs, device=device, dtype=dtype) for _ in range(COPIES)]
    for layer in layers:
        nn.init.normal_(layer.requires_grad_(False).weight, std=WEIGHT_STD)
    if can_pack(layers[0].weight):
        packed = [OnednnLinear(layer.weight, layer.bias) for layer in layers]
        return {"oneDNN": [partial(each.multiply, x, "none") for each in packed]}
    return {"torch": [partial(layer, x) for layer in layers]}


def _fp8_gemms(num_tokens: int, inputs: int, outputs: int, device: str) -> dict[str, Gemms]:
    """X W^T in fp8 with one scale per row of both, or one for each of them, bf16 out."""
    x = torch.randn((num_tokens, inputs), device=device)
    weights = [torch.randn((outputs, inputs), device=device) * WEIGHT_STD for _ in range(COPIES)]

    def gemms(dims: tuple[int, ...]) -> Gemms:
        values, scale = _quantized(x, dims)
        own = [_quantized(weight, dims) for weight in weights]
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
        return [partial(multiply, values, w.t(), scale_a=scale, scale_b=s.t().contiguous()) for w, s in own]

    return {"row-wise": gemms((1,)), "tensor-wise": gemms((0, 1))}


def _quantized(matrix: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 e4m3, and its scales, over `dims` of which it becomes as large as possible."""
    scale = matrix.abs().amax(dim=dims, keepdim=True) / 448
    values = (matrix / scale).to(torch.float8_e4m3fn)
    return values, scale if dims == (1,) else scale.view(())


def _quack_gemms(
    num_tokens: int, inputs: int, outputs: int, device: str, precision: ResolvedPrecision
) -> Gemms:
    """The product of the models that has the least in its epilogue: a factor for each row, and a bias."""
    from virnuc_core.models.kernels.products import multiply_normed  # imports quack

    dtype = torch.float8_e4m3fn if precision == "fp8" else DTYPES[precision]
    x = torch.randn((num_tokens, inputs), device=device).to(dtype)
    factor, bias = torch.ones((1, num_tokens), device=device), torch.zeros((1, outputs), device=device)
    scale = 1.0 if precision == "fp8" else WEIGHT_STD
    weights = [(torch.randn((outputs, inputs), device=device) * scale).to(dtype) for _ in range(COPIES)]
    return [partial(multiply_normed, x, factor, weight, bias) for weight in weights]


@contextmanager
def sampling_power(device: str) -> Iterator[list[float]]:
    """Watts that a GPU draws, by nvidia-smi, sampled in a thread; empty on the CPU."""
    watts: list[float] = []
    done = threading.Event()

    def sample() -> None:
        gpu = physical_gpu(int(device.partition(":")[2]))
        while not done.wait(POWER_SECONDS):
            for index, uuid, draw in query_gpus(("index", "uuid", "power.draw.instant")):
                if (gpu == index or uuid.startswith(gpu)) and draw.replace(".", "").isdecimal():
                    watts.append(float(draw))

    thread = threading.Thread(target=sample, daemon=True)
    if device != "cpu":
        thread.start()
    try:
        yield watts
    finally:
        done.set()
        if device != "cpu":
            thread.join()


def speed_of(repeats: Sequence[float], tokens: int, sequences: int, letters: int, packed: float) -> Json:
    """Tokens/s measured, and tokens, sequences and letters (residues or bases) per second at their median."""
    median = statistics.median(repeats)
    return {
        "tokens_per_second": median,
        "repeats": list(repeats),
        "sequences_per_second": median * sequences / tokens,
        "letters_per_second": median * letters / tokens,
        "packing_efficiency": packed,
    }


Batches = list[tuple[Tensor, PackedLayout]]


def make_batches(
    planned: PlannedModel, model: Encoder, lengths: str, device: str
) -> tuple[Batches, tuple[int, int, int, float]]:
    """Draws sequences, tokenizes and packs them as a run does, and uploads the batches; their work as for `speed_of`."""
    tokens, letters = _draw(planned, lengths)
    least_tokens = MIN_FILL * planned.token_budget
    batches_of_all = pack(tokens.num_tokens, planned.token_budget).batches
    row_sets = [rows for rows in batches_of_all if tokens.num_tokens[rows].sum() >= least_tokens]
    rows, packed = np.concatenate(row_sets), [tokens.take(rows) for rows in row_sets]
    sizes = [len(batch.input_ids) for batch in packed]
    capacity, num_tokens = sum(max(size, planned.token_budget) for size in sizes), sum(sizes)
    batches = [
        (
            torch.from_numpy(batch.input_ids).to(device),
            model.build_layout(batch.cu_seqlens, planned.attention),
        )
        for batch in packed
    ]
    return batches, (num_tokens, len(rows), int(letters[rows].sum()), num_tokens / capacity)


def _draw(planned: PlannedModel, lengths: str) -> tuple[TokenColumn, Int64]:
    """Tokens for about `NUM_BATCHES` full batches, and the residues or bases of each sequence."""
    rng = np.random.default_rng(0)
    wanted = FILL * NUM_BATCHES * planned.token_budget
    family = planned.family
    tokenizer = Esm2Tokenizer() if family == "esm2" else open_checkpoint(planned.location, family).tokenizer
    sample = random_sequences(family, draw_lengths(lengths, 256, rng), rng)
    per_sequence = tokenizer.encode(sample).num_tokens.mean()
    letters = draw_lengths(lengths, max(NUM_BATCHES, int(wanted // per_sequence)), rng)
    return tokenizer.encode(random_sequences(family, letters, rng)), letters


@torch.inference_mode()
def measure_forward(name: str, planned: PlannedModel, options: argparse.Namespace, device: str) -> list[Json]:
    """One case per length distribution; the floor and all distributions are measured in turn."""
    distributions = (options.lengths or USUAL_LENGTHS[planned.family]).split(",")
    started = time.perf_counter()
    checkpoint = open_checkpoint(planned.location, planned.family)
    model = load_model(checkpoint, device, planned.precision, compiled=planned.compiled)
    synchronize(device)
    load_seconds = time.perf_counter() - started
    made = [make_batches(planned, model, lengths, device) for lengths in distributions]
    steps = [[partial(model.embed, *batch, planned.repr_layer) for batch in batches] for batches, _ in made]
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    for step in chain.from_iterable(steps):  # warm-up
        step()
        synchronize(device)
    warmup_seconds = time.perf_counter() - started
    peak_memory = None if device == "cpu" else torch.cuda.max_memory_allocated(device)
    floor, floor_by = gemm_floor(planned.spec, planned.precision, planned.token_budget, device)
    floor_repeats: list[float] = []
    repeats: list[list[float]] = [[] for _ in made]
    watts: list[list[float]] = [[] for _ in made]
    for _ in range(options.repeats):
        floor_repeats.append(rounds_per_second([floor], options.seconds, device) * planned.token_budget)
        for rates, power, own, (_, work) in zip(repeats, watts, steps, made, strict=True):
            with sampling_power(device) as sampled:
                rates.append(rounds_per_second(own, options.seconds, device) * work[0])
            power += sampled
    common = {
        "model": name,
        "family": planned.family,
        "precision": planned.precision,
        "attention": planned.attention,
        "compiled": planned.compiled,
        "token_budget": planned.token_budget,
        "load_seconds": load_seconds,
        "warmup_seconds": warmup_seconds,
        "peak_memory_bytes": peak_memory,
        "floor_tokens_per_second": statistics.median(floor_repeats),
        "floor_repeats": floor_repeats,
        "floor_by": floor_by,
        "flops_per_token": flops_per_token(planned.spec),
        "peak_tflops": peak_tflops(planned.precision, device),
        "auto_precision": resolve_precision("auto", device),
    }
    return [
        _case(common, *measured)
        for measured in zip(distributions, repeats, watts, (work for _, work in made), strict=True)
    ]


def _case(common: Json, lengths: str, rates: list[float], watts: list[float], work: Any) -> Json:
    """A case from what all of the model have in `common`, and prints it."""
    forward, floor, peak = speed_of(rates, *work), common["floor_tokens_per_second"], common["peak_tflops"]
    rate = forward["tokens_per_second"]
    tflops = rate * common["flops_per_token"] / 1e12
    of_peak = tflops / peak if peak else None
    print(
        f"{common['model']} {common['precision']} {lengths}: {rate:,.0f} tokens/s, {tflops:,.1f} TFLOP/s",
        end="",
    )
    print(f" ({of_peak:.1%} of the peak)" if of_peak else "", end="")
    print(f", {rate / floor:.3f} of the floor of {floor:,.0f}", flush=True)
    found = {
        "over_floor": rate / floor,
        "tflops": tflops,
        "of_peak": of_peak,
        "tokens_per_joule": rate / statistics.mean(watts) if watts else None,
    }
    return {**common, "lengths": lengths, "forward": forward, **found, "end_to_end": []}


def peak_tflops(precision: ResolvedPrecision, device: str) -> int | None:
    known = device != "cpu" and torch.cuda.get_device_name(device).startswith(PEAK_GPUS)
    return PEAK_TFLOPS.get(precision) if known else None


def measure_end_to_end(case: Json, config: RunConfig, devices: tuple[str, ...], options: Any) -> Json:
    """From stored sequences to shards on all devices; a lane is timed from its loaded models to its last shard.

    The slowest lane counts. `over_gpu_only` is the share of the speed of forward passes.
    """
    family: Family = case["family"]
    count = round(case["forward"]["sequences_per_second"] * options.end_to_end) * len(devices)
    seconds, loads, counters = [], [], None
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="virnuc-bench-") as scratch:
            folder, fasta = RunFolder(Path(scratch)), Path(scratch) / "sequences.fa"
            rng = np.random.default_rng(1)
            drawn = draw_lengths(case["lengths"], max(len(devices), count), rng)
            write_fasta(fasta, random_sequences(family, drawn, rng))
            alphabet: Alphabet = "protein" if family == "esm2" else "dna"
            store = build_frame_store([fasta], folder.frames, None, alphabet)
            plan = make_plan(config, store, "embed", devices)
            write_plan(folder.plan, plan)
            lanes = _run_lanes(folder, devices)
        seconds.append(max(lane_seconds for _, lane_seconds in lanes))
        loads.append(max(report.load_seconds for report, _ in lanes))
        counters = sum_counters(shard.counters for report, _ in lanes for shard in report.shards)
    assert counters is not None
    [model] = counters.models
    letters = counters.residues + counters.bases
    rates = [model.tokens / each for each in seconds]
    speed = speed_of(rates, model.tokens, counters.frames, letters, model.packing_efficiency)
    ratio = speed["tokens_per_second"] / len(devices) / case["forward"]["tokens_per_second"]
    print(
        f"end to end on {len(devices)}: {speed['tokens_per_second']:,.0f} tokens/s, {ratio:.3f} of it",
        flush=True,
    )
    return {
        "devices": list(devices),
        "speed": speed,
        "over_gpu_only": ratio,
        "load_seconds": statistics.median(loads),
        "work_seconds": seconds,
    }


def _run_lanes(folder: RunFolder, devices: tuple[str, ...]) -> list[tuple[LaneReport, float]]:
    times: dict[int, list[float]] = {}

    def observe(event: LaneEvent) -> None:
        if isinstance(event, ModelsLoaded):
            times[event.lane] = []
        if not isinstance(event, GpuSample):
            times.setdefault(event.lane, []).append(time.perf_counter())

    reports = LocalLanes(devices, observe, in_processes=True).compute(folder)
    return [(report, times[report.lane][-1] - times[report.lane][0]) for report in reports]


def machine(device: str) -> Json:
    """Hardware and versions that a result depends on; those of the GPU as far as nvidia-smi reports them."""
    found: Json = {
        "virnuc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "triton": installed_version("triton") or None,
        "cuda": torch.version.cuda,
    }
    if device == "cpu":
        return {**found, "device": f"{platform.machine()} CPU", "threads": torch.get_num_threads()}
    names = ("driver_version", "power.limit", "clocks.max.sm")
    values = next(iter(query_gpus(names)), ())
    facts = {name.replace(".", "_"): value for name, value in zip(names, values, strict=False)}
    name = torch.cuda.get_device_name(device)
    return {**found, "device": name, "gpus": torch.cuda.device_count(), **facts}


def measure(options: argparse.Namespace) -> list[Json]:
    devices = resolve_devices(tuple(options.devices.split(",")))
    cases = []
    for name in options.model:
        family, model = family_of(name)
        for precision in options.precision.split(","):
            config = RunConfig(
                chunk_length=None,
                esm_model=model if family == "esm2" else None,
                dnabert_model=model if family == "dnabert_s" else None,
                precision=precision,
                token_budget=options.token_budget,
                attention=options.attention,
                compile=options.compile,
            )
            [planned] = plan_models(config, devices, None)
            half = None if options.end_to_end is None else options.end_to_end / 2
            config = config.model_copy(update={"token_budget": planned.token_budget, "shard_seconds": half})
            found = measure_forward(name, planned, options, devices[0])
            gc.collect()
            if devices[0] != "cpu":
                torch.cuda.empty_cache()
            for case in found if options.end_to_end else ():
                case["end_to_end"] = [measure_end_to_end(case, config, devices, options)]
            cases += found
    return cases


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options_of("forward", __doc__)
    add = parser.add_argument
    add("--model", action="append", required=True, metavar="NAME|PATH", help="as in embed; several times")
    add("--precision", default="auto", metavar="P,P,...")
    add("--lengths", metavar="L,L,...", help="fixed:N or lognormal letters [166 residues, 500 bases]")
    add("--devices", default="auto", metavar="auto|cpu|0,1,...")
    add("--token-budget", type=int, metavar="N", help="most tokens in one batch [by the device]")
    add("--attention", default="auto", choices=get_args(AttentionChoice))
    add("--compile", action="store_true", help="torch.compile the layers")
    add("--seconds", type=float, default=5.0, metavar="S", help="least length of one measurement [5]")
    add("--repeats", type=int, default=3, metavar="N", help="measurements of each figure [3]")
    add("--end-to-end", type=float, metavar="S", help="also to shards: S seconds of work on each device")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        device = resolve_devices(tuple(options.devices.split(",")))[0]
        facts = {"command": command_of("forward"), "machine": machine(device)}
        cases = measure(options)
    except VirnucError as error:
        sys.exit(f"error: {error}")
    date = datetime.now(UTC).date().isoformat()
    write_report({**facts, "cases": cases, "date": date, "kind": "bench", "schema_version": 1}, options.out)


if __name__ == "__main__":
    main()
