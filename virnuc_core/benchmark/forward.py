"""Forward passes alone, and their floor: the model's own matrix products back to back, on values of realistic size."""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn, Tokenizer
from virnuc_core.benchmark.report import Json, speed
from virnuc_core.benchmark.settings import BenchSettings, Lengths
from virnuc_core.benchmark.synthetic import draw_lengths, random_sequences, random_tokens
from virnuc_core.inference.plan import PlannedModel
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.compilation import compile_layers
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.fused import quantize_rows
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import ModelSpec, ResolvedPrecision

_NUM_BATCHES: Final = 8
# Fill the drawn work aims at, and the least of a batch that is used: first-fit may leave the last nearly empty.
_FILL, _LEAST_FILL = 0.99, 0.5
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


def gemm_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Input and output width of every matrix product of a layer."""
    width, ffn = spec.embedding_dim, spec.ffn_dim
    inner = ffn if spec.family == "esm2" else 2 * ffn
    return (width, 3 * width), (width, width), (width, inner), (ffn, width)


class GemmFloor:
    """The matrix products of a whole forward pass over `num_tokens` tokens."""

    def __init__(self, spec: ModelSpec, precision: ResolvedPrecision, num_tokens: int, device: str) -> None:
        self._num_layers = spec.num_layers
        make = _fp8_gemms if precision == "fp8" else partial(_gemms, dtype=_DTYPES[precision])
        per_shape = [make(num_tokens, *shape, device=device) for shape in gemm_shapes(spec)]
        self._layers = cycle(list(zip(*per_shape, strict=True)))

    def launch(self) -> None:
        """Launches the products of all layers."""
        for _ in range(self._num_layers):
            for gemm in next(self._layers):
                gemm()


def _gemms(
    num_tokens: int, inputs: int, outputs: int, *, device: str, dtype: torch.dtype
) -> list[Callable[[], Tensor]]:
    """X W^T + b for each copy of W; by oneDNN on the CPU, as in the models."""
    x = torch.randn(num_tokens, inputs, device=device, dtype=dtype)
    bias = torch.randn(outputs, device=device, dtype=dtype)
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) * _WEIGHT_STD for _ in range(_COPIES)]
    if device == "cpu" and torch.backends.mkldnn.is_available():
        multiply = torch.ops.mkldnn._linear_pointwise
        return [partial(multiply, x, weight, bias, "none", [], "") for weight in weights]
    return [partial(functional.linear, x, weight, bias) for weight in weights]


def _fp8_gemms(num_tokens: int, inputs: int, outputs: int, *, device: str) -> list[Callable[[], Tensor]]:
    """X W^T in fp8 with one scale per row of both, bf16 out."""
    x, x_scale = quantize_rows(torch.randn(num_tokens, inputs, device=device))
    multiply = partial(torch._scaled_mm, x, scale_a=x_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    weights = [
        quantize_rows(torch.randn(outputs, inputs, device=device) * _WEIGHT_STD) for _ in range(_COPIES)
    ]
    return [partial(multiply, mat2=weight.t(), scale_b=scale.t()) for weight, scale in weights]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSet:
    """Batches of one length distribution: token ids int32 (T,) and layouts; random ids have no letters."""

    lengths: Lengths
    batches: tuple[tuple[Tensor, PackedLayout], ...]
    tokens: int
    sequences: int
    letters: int | None
    packing_efficiency: float

    @classmethod
    def make(cls, planned: PlannedModel, model: Encoder, lengths: Lengths, device: str) -> Self:
        """Draws sequences, tokenizes and packs them as a run does, and uploads the batches."""
        tokens, letters = _draw(planned, lengths)
        packing = pack(tokens.num_tokens, planned.token_budget, padded=planned.attention == "padded")
        kept = packing.batch_slots >= _LEAST_FILL * planned.token_budget
        row_sets = [rows for rows, keep in zip(packing.batches, kept, strict=True) if keep]
        packed = [tokens.take(rows) for rows in row_sets]
        rows = np.concatenate(row_sets)
        capacity = np.maximum(packing.batch_slots[kept], planned.token_budget)
        return cls(
            lengths=lengths,
            batches=tuple(
                (
                    torch.from_numpy(batch.input_ids).to(device),
                    model.build_layout(batch.cu_seqlens, planned.attention),
                )
                for batch in packed
            ),
            tokens=sum(len(batch.input_ids) for batch in packed),
            sequences=len(rows),
            letters=None if letters is None else int(letters[rows].sum()),
            packing_efficiency=float(packing.batch_tokens[kept].sum() / capacity.sum()),
        )

    def steps(self, model: Encoder, repr_layer: int) -> list[Callable[[], Tensor]]:
        """The forward pass of each batch."""
        return [partial(model.embed, input_ids, layout, repr_layer) for input_ids, layout in self.batches]

    def speed(self, repeats: Sequence[float]) -> Json:
        """The speed from measurements in tokens/s."""
        return speed(
            repeats,
            tokens=self.tokens,
            sequences=self.sequences,
            letters=self.letters,
            packing_efficiency=self.packing_efficiency,
        )


def measure_forward(name: str, planned: PlannedModel, settings: BenchSettings, device: str) -> list[Json]:
    """One case per length distribution; the floor and all distributions are measured alternately."""
    with torch.inference_mode():
        started = time.perf_counter()
        model = load_model(open_checkpoint(planned.location, planned.family), device, planned.precision)
        compile_layers(model, planned.compile_mode)
        synchronize(device)
        load_seconds = time.perf_counter() - started
        sets = [
            BatchSet.make(planned, model, lengths, device) for lengths in settings.lengths_for(planned.family)
        ]
        steps = [batch_set.steps(model, planned.repr_layer) for batch_set in sets]
        warmup_seconds, peak_memory = _warm_up([step for each in steps for step in each], device)
        floor = GemmFloor(planned.spec, planned.precision, planned.token_budget, device)
        floor_repeats: list[float] = []
        repeats: list[list[float]] = [[] for _ in sets]
        for _ in range(settings.repeats):
            rounds = rounds_per_second([floor.launch], settings.seconds, device)
            floor_repeats.append(rounds * planned.token_budget)
            for rates, own, batch_set in zip(repeats, steps, sets, strict=True):
                rates.append(rounds_per_second(own, settings.seconds, device) * batch_set.tokens)
    floor_rate = statistics.median(floor_repeats)
    what = {
        "model": name,
        "family": planned.family,
        "precision": planned.precision,
        "attention": planned.attention,
        "compile_mode": planned.compile_mode,
    }
    cases = []
    for rates, batch_set in zip(repeats, sets, strict=True):
        forward = batch_set.speed(rates)
        case = {
            **what,
            "lengths": str(batch_set.lengths),
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
        _log.info(
            "%s %s %s: %.0f tokens/s, %.3f of the floor of %.0f",
            *(name, planned.precision, batch_set.lengths),
            *(forward["tokens_per_second"], case["over_floor"], floor_rate),
        )
        cases.append(case)
    return cases


def _draw(planned: PlannedModel, lengths: Lengths) -> tuple[TokenColumn, npt.NDArray[np.int64] | None]:
    """Tokens for about `_NUM_BATCHES` full batches, and the residues or bases of each sequence."""
    rng = np.random.default_rng(0)
    wanted = _FILL * _NUM_BATCHES * planned.token_budget
    if lengths.kind == "tokens":
        count = max(_NUM_BATCHES, int(wanted // lengths.value))
        return random_tokens(planned.spec, draw_lengths(lengths, count, rng), rng), None
    tokenizer: Tokenizer = Esm2Tokenizer()
    if planned.family == "dnabert_s":
        tokenizer = DnabertTokenizer(open_checkpoint(planned.location, planned.family).tokenizer_path)
    sample = random_sequences(planned.family, draw_lengths(lengths, 256, rng), rng)
    per_sequence = tokenizer.encode(sample).num_tokens.mean()
    letters = draw_lengths(lengths, max(_NUM_BATCHES, int(wanted // per_sequence)), rng)
    return tokenizer.encode(random_sequences(planned.family, letters, rng)), letters


def _warm_up(steps: Sequence[Callable[[], object]], device: str) -> tuple[float, int | None]:
    """Seconds of the first pass over every batch, compilation included, and peak memory in bytes."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    for step in steps:
        step()
        synchronize(device)
    seconds = time.perf_counter() - started
    return seconds, None if device == "cpu" else torch.cuda.max_memory_allocated(device)
