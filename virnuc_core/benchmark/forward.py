"""Forward passes alone: batches ready on the device, mean vectors there, against the floor in the same run."""

import logging
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.benchmark.clock import rounds_per_second, synchronize
from virnuc_core.benchmark.floor import GemmFloor
from virnuc_core.benchmark.made_sequences import draw_lengths, random_sequences, random_tokens
from virnuc_core.benchmark.results import Case, Speed, speed_of
from virnuc_core.benchmark.settings import BenchSettings, Lengths
from virnuc_core.inference.prefetch import Tokenizer
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.compilation import compile_layers
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.loading import load_model
from virnuc_core.models.weights import tokenizer_path
from virnuc_core.run_plan import PlannedModel

_NUM_BATCHES = 8
# How full the batches are asked to be; first-fit leaves the last one nearly empty otherwise.
_FILL = 0.99
_LEAST_FILL = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A batch on the device: token ids int32 (T,), and its layout."""

    input_ids: Tensor
    layout: PackedLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSet:
    """Batches of one distribution of lengths, to be run in turn.

    Attributes:
        lengths: the distribution.
        batches: on the device.
        tokens: in all of them together.
        sequences: the same.
        letters: the same; None where only tokens were made.
        packing_efficiency: in (0, 1].
    """

    lengths: Lengths
    batches: tuple[ReadyBatch, ...]
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
        return cls(
            lengths=lengths,
            batches=tuple(
                ReadyBatch(
                    torch.from_numpy(batch.input_ids).to(device),
                    model.build_layout(batch.cu_seqlens, planned.attention),
                )
                for batch in packed
            ),
            tokens=sum(len(batch.input_ids) for batch in packed),
            sequences=len(rows),
            letters=None if letters is None else int(letters[rows].sum()),
            packing_efficiency=float(
                packing.batch_tokens[kept].sum()
                / np.maximum(packing.batch_slots[kept], planned.token_budget).sum()
            ),
        )


def measure_forward(name: str, planned: PlannedModel, settings: BenchSettings, device: str) -> list[Case]:
    """Measures a model at every distribution of lengths; floor and model take turns.

    Args:
        name: of the model, as asked for.
        planned: how it computes.
        settings: lengths, seconds and repeats.
        device: "cpu" or "cuda:N".
    """
    with torch.inference_mode():
        started = time.perf_counter()
        model, _ = load_model(resolve_checkpoint(planned.location, planned.family), device, planned.precision)
        compile_layers(model, planned.compile_mode)
        synchronize(device)
        load_seconds = time.perf_counter() - started
        asked = settings.lengths_for(planned.family)
        sets = [BatchSet.make(planned, model, lengths, device) for lengths in asked]
        warmup_seconds, peak = _warm_up(model, planned, sets, device)
        floor = GemmFloor(planned.spec, planned.precision, planned.token_budget, device)
        floor_repeats: list[float] = []
        repeats: list[list[float]] = [[] for _ in sets]
        for _ in range(settings.repeats):
            rounds = rounds_per_second([floor.launch], settings.seconds, device)
            floor_repeats.append(rounds * planned.token_budget)
            for rates, batch_set in zip(repeats, sets, strict=True):
                steps = [partial(_embed, model, planned.repr_layer, batch) for batch in batch_set.batches]
                rates.append(rounds_per_second(steps, settings.seconds, device) * batch_set.tokens)
    floor_rate = statistics.median(floor_repeats)
    cases = []
    for rates, batch_set in zip(repeats, sets, strict=True):
        speed = _speed(rates, batch_set)
        cases.append(
            Case(
                model=name,
                family=planned.family,
                precision=planned.precision,
                attention=planned.attention,
                compile_mode=planned.compile_mode,
                lengths=str(batch_set.lengths),
                token_budget=planned.token_budget,
                load_seconds=load_seconds,
                warmup_seconds=warmup_seconds,
                peak_memory_bytes=peak,
                forward=speed,
                floor_tokens_per_second=floor_rate,
                floor_repeats=tuple(floor_repeats),
                over_floor=speed.tokens_per_second / floor_rate,
            )
        )
        _log.info(
            "%s %s %s: %.0f tokens/s, %.3f of the floor of %.0f",
            *(name, planned.precision, batch_set.lengths, speed.tokens_per_second),
            *(cases[-1].over_floor, floor_rate),
        )
    return cases


def _draw(planned: PlannedModel, lengths: Lengths) -> tuple[TokenColumn, npt.NDArray[np.int64] | None]:
    """Tokens for about `_NUM_BATCHES` full batches, and the letters of each sequence."""
    rng = np.random.default_rng(0)
    wanted = _FILL * _NUM_BATCHES * planned.token_budget
    if lengths.kind == "tokens":
        count = max(_NUM_BATCHES, int(wanted // lengths.value))
        return random_tokens(planned.spec, draw_lengths(lengths, count, rng), rng), None
    tokenizer: Tokenizer = Esm2Tokenizer()
    if planned.family == "dnabert_s":
        checkpoint = resolve_checkpoint(planned.location, planned.family)
        tokenizer = DnabertTokenizer(tokenizer_path(checkpoint))
    sample = draw_lengths(lengths, 256, rng)
    per_sequence = tokenizer.encode(random_sequences(planned.family, sample, rng)).num_tokens.mean()
    letters = draw_lengths(lengths, max(_NUM_BATCHES, int(wanted // per_sequence)), rng)
    return tokenizer.encode(random_sequences(planned.family, letters, rng)), letters


def _warm_up(
    model: Encoder, planned: PlannedModel, sets: list[BatchSet], device: str
) -> tuple[float, int | None]:
    """Seconds of the first pass over every batch, and the most memory it took."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    for batch_set in sets:
        for batch in batch_set.batches:
            _embed(model, planned.repr_layer, batch)
            synchronize(device)
    seconds = time.perf_counter() - started
    return seconds, None if device == "cpu" else torch.cuda.max_memory_allocated(device)


def _embed(model: Encoder, repr_layer: int, batch: ReadyBatch) -> Tensor:
    return model.embed(batch.input_ids, batch.layout, repr_layer)


def _speed(rates: list[float], batch_set: BatchSet) -> Speed:
    return speed_of(
        rates, batch_set.tokens, batch_set.sequences, batch_set.letters, batch_set.packing_efficiency
    )
