"""Forward passes alone, and their floor: the model's own matrix products back to back, on values of realistic size."""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import Esm2Tokenizer, TokenColumn
from virnuc_core.benchmark.settings import BenchSettings, Lengths
from virnuc_core.benchmark.synthetic import draw_lengths, random_sequences, random_tokens
from virnuc_core.inference.plan import PlannedModel
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.compilation import compile_layers
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.fused import quantize_rows
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.models.onednn import Int8Linear, PackedLinear, can_pack, quantize_rows_uint8
from virnuc_core.specs import ModelSpec, ResolvedPrecision

_NUM_BATCHES: Final = 8
# Fill the drawn work aims at, and the minimum of a batch that is used: first-fit may leave the last nearly empty.
_FILL, _MIN_FILL = 0.99, 0.5
# As in the engine: the device never waits for the host, and memory stays bounded.
_MAX_IN_FLIGHT: Final = 3
# Copies of each weight, used in turn so that none stays in L2 from one layer to the next.
_COPIES: Final = 4
_WEIGHT_STD: Final = 0.02
_DTYPES: Final[dict[ResolvedPrecision, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

Json = dict[str, Any]

_log = logging.getLogger(__name__)


def rounds_per_second(steps: Sequence[Callable[[], object]], seconds: float, device: str) -> float:
    """Complete rounds of `steps` per second over at least `seconds`; steps launch on the device's current stream."""
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
            if len(events) > _MAX_IN_FLIGHT:
                events.popleft().synchronize()
        rounds += 1
    synchronize(device)
    return rounds / (time.perf_counter() - started)


def synchronize(device: str) -> None:
    """Waits until the device is idle."""
    if device != "cpu":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Totals of measured work: tokens with special ones and without padding; letters are residues or bases, None if unknown."""

    tokens: int
    sequences: int
    letters: int | None
    packing_efficiency: float

    def speed(self, repeats: Sequence[float]) -> Json:
        """Measurements in tokens/s, and tokens, sequences and letters per second at their median."""
        median = statistics.median(repeats)
        return {
            "tokens_per_second": median,
            "repeats": list(repeats),
            "sequences_per_second": median * self.sequences / self.tokens,
            "letters_per_second": None if self.letters is None else median * self.letters / self.tokens,
            "packing_efficiency": self.packing_efficiency,
        }


def gemm_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Input and output width of every matrix product of a layer."""
    width, ffn = spec.embedding_dim, spec.ffn_dim
    inner = ffn if spec.family == "esm2" else 2 * ffn
    return (width, 3 * width), (width, width), (width, inner), (ffn, width)


def gemm_floor(
    spec: ModelSpec, precision: ResolvedPrecision, num_tokens: int, device: str
) -> Callable[[], None]:
    """A function that launches the matrix products of a whole forward pass over `num_tokens` tokens."""
    if precision == "int8":
        make = _int8_gemms
    else:
        make = _fp8_gemms if precision == "fp8" else partial(_gemms, dtype=_DTYPES[precision])
    per_shape = [make(num_tokens, *shape, device=device) for shape in gemm_shapes(spec)]
    layers = cycle(list(zip(*per_shape, strict=True)))

    def launch() -> None:
        for gemm in chain.from_iterable(islice(layers, spec.num_layers)):
            gemm()

    return launch


def _gemms(
    num_tokens: int, inputs: int, outputs: int, *, device: str, dtype: torch.dtype
) -> list[Callable[[], Tensor]]:
    """X W^T + b for each copy of W; by oneDNN on the CPU, as in the models."""
    x = torch.randn((num_tokens, inputs), device=device, dtype=dtype)
    layers = _layers(inputs, outputs, device=device, dtype=dtype)
    if can_pack(layers[0].weight):
        return [partial(PackedLinear(layer).multiply, x, "none") for layer in layers]
    return [partial(layer, x) for layer in layers]


def _int8_gemms(num_tokens: int, inputs: int, outputs: int, *, device: str) -> list[Callable[[], Tensor]]:
    """X W^T in int8, fp32 out, on the CPU."""
    x = quantize_rows_uint8(torch.randn(num_tokens, inputs))
    layers = _layers(inputs, outputs, device=device, dtype=torch.float32)
    return [partial(Int8Linear(layer, torch.ones(inputs)).product, x) for layer in layers]


def _layers(inputs: int, outputs: int, *, device: str, dtype: torch.dtype) -> list[nn.Linear]:
    layers = [nn.Linear(inputs, outputs, device=device, dtype=dtype) for _ in range(_COPIES)]
    for layer in layers:
        nn.init.normal_(layer.requires_grad_(False).weight, std=_WEIGHT_STD)
    return layers


def _fp8_gemms(num_tokens: int, inputs: int, outputs: int, *, device: str) -> list[Callable[[], Tensor]]:
    """X W^T in fp8 with one scale per row of both, bf16 out."""
    draw = partial(torch.randn, device=device)
    x, x_scale = quantize_rows(draw(num_tokens, inputs))
    multiply = partial(torch._scaled_mm, x, scale_a=x_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    weights = [quantize_rows(draw(outputs, inputs) * _WEIGHT_STD) for _ in range(_COPIES)]
    return [partial(multiply, mat2=weight.t(), scale_b=scale.t()) for weight, scale in weights]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSet:
    """Batches of one length distribution: token ids int32 (T,) and layouts."""

    batches: tuple[tuple[Tensor, PackedLayout], ...]
    work: Work

    @classmethod
    def make(cls, planned: PlannedModel, model: Encoder, lengths: Lengths, device: str) -> Self:
        """Draws sequences, tokenizes and packs them as a run does, and uploads the batches."""
        tokens, letters = _draw(planned, lengths)
        packing = pack(tokens.num_tokens, planned.token_budget, padded=planned.attention == "padded")
        kept = packing.batch_slots >= _MIN_FILL * planned.token_budget
        row_sets = [rows for rows, keep in zip(packing.batches, kept, strict=True) if keep]
        packed = [tokens.take(rows) for rows in row_sets]
        rows = np.concatenate(row_sets)
        capacity = np.maximum(packing.batch_slots[kept], planned.token_budget)
        work = Work(
            tokens=sum(len(batch.input_ids) for batch in packed),
            sequences=len(rows),
            letters=None if letters is None else int(letters[rows].sum()),
            packing_efficiency=float(packing.batch_tokens[kept].sum() / capacity.sum()),
        )
        input_ids = [torch.from_numpy(batch.input_ids).to(device) for batch in packed]
        layouts = [model.build_layout(batch.cu_seqlens, planned.attention) for batch in packed]
        return cls(batches=tuple(zip(input_ids, layouts, strict=True)), work=work)

    def steps(self, model: Encoder, repr_layer: int) -> list[Callable[[], Tensor]]:
        """The forward pass of each batch."""
        return [partial(model.embed, input_ids, layout, repr_layer) for input_ids, layout in self.batches]


def _draw(planned: PlannedModel, lengths: Lengths) -> tuple[TokenColumn, npt.NDArray[np.int64] | None]:
    """Tokens for about `_NUM_BATCHES` full batches, and the residues or bases of each sequence."""
    rng = np.random.default_rng(0)
    wanted = _FILL * _NUM_BATCHES * planned.token_budget
    if lengths.kind == "tokens":
        count = max(_NUM_BATCHES, int(wanted // lengths.value))
        return random_tokens(planned.spec, draw_lengths(lengths, count, rng), rng), None
    esm2, family = planned.family == "esm2", planned.family
    tokenizer = Esm2Tokenizer() if esm2 else open_checkpoint(planned.location, family).tokenizer
    sample = random_sequences(family, draw_lengths(lengths, 256, rng), rng)
    per_sequence = tokenizer.encode(sample).num_tokens.mean()
    letters = draw_lengths(lengths, max(_NUM_BATCHES, int(wanted // per_sequence)), rng)
    return tokenizer.encode(random_sequences(family, letters, rng)), letters


def measure_forward(name: str, planned: PlannedModel, settings: BenchSettings, device: str) -> list[Json]:
    """One case per length distribution; the floor and all distributions are measured alternately."""
    distributions = settings.lengths_for(planned.family)
    with torch.inference_mode():
        started = time.perf_counter()
        model = load_model(open_checkpoint(planned.location, planned.family), device, planned.precision)
        compile_layers(model, planned.compile_mode)
        synchronize(device)
        load_seconds = time.perf_counter() - started
        sets = [BatchSet.make(planned, model, lengths, device) for lengths in distributions]
        steps = [batch_set.steps(model, planned.repr_layer) for batch_set in sets]
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        for step in chain.from_iterable(steps):  # warm-up, compilation included
            step()
            synchronize(device)
        warmup_seconds = time.perf_counter() - started
        peak_memory = None if device == "cpu" else torch.cuda.max_memory_allocated(device)
        floor = gemm_floor(planned.spec, planned.precision, planned.token_budget, device)
        floor_repeats: list[float] = []
        repeats: list[list[float]] = [[] for _ in sets]
        for _ in range(settings.repeats):
            floor_repeats.append(rounds_per_second([floor], settings.seconds, device) * planned.token_budget)
            for rates, own, batch_set in zip(repeats, steps, sets, strict=True):
                rates.append(rounds_per_second(own, settings.seconds, device) * batch_set.work.tokens)
    floor_rate = statistics.median(floor_repeats)
    cases = []
    for lengths, rates, made in zip(distributions, repeats, sets, strict=True):
        forward = made.work.speed(rates)
        case = {
            "model": name,
            "family": planned.family,
            "precision": planned.precision,
            "attention": planned.attention,
            "compile_mode": planned.compile_mode,
            "lengths": str(lengths),
            "token_budget": planned.token_budget,
            "load_seconds": load_seconds,
            "warmup_seconds": warmup_seconds,
            "peak_memory_bytes": peak_memory,
            "forward": forward,
            "floor_tokens_per_second": floor_rate,
            "floor_repeats": floor_repeats,
            "over_floor": forward["tokens_per_second"] / floor_rate,
            "end_to_end": [],
        }
        rate, ratio = forward["tokens_per_second"], case["over_floor"]
        what = f"{name} {planned.precision} {lengths}"
        _log.info("%s: %.0f tokens/s, %.3f of the floor of %.0f", what, rate, ratio, floor_rate)
        cases.append(case)
    return cases
