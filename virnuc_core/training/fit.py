"""Fits heads of both kinds to labelled vectors and calibrates them; reproducible on the same kind of machine."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.columns import Bool, Float32, Float64, Int64
from virnuc_core.models.heads import (
    TEMPERATURE_BOUNDS,
    ContigHead,
    Head,
    HeadSpec,
    MLPClassifier,
    fixed_threads,
)
from virnuc_core.settings import TrainerSettings
from virnuc_core.training.contigs import (
    ContigBatch,
    ContigSampler,
    LabelledRuns,
    LossWeights,
    cut_runs,
    head_losses,
)

_ROWS_AT_ONCE: Final = 4096
_BATCH_FRAMES: Final = 256

Batch = TypeVar("Batch")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledVectors:
    """n frames whose class is known: features (n, D), DNA before protein, and sampling probabilities (n,)."""

    features: Float32
    is_viral: Bool
    weights: Float64


def vectors_of(runs: LabelledRuns) -> LabelledVectors:
    """The rows of runs, which share the weights of their runs."""
    run_of_row = np.repeat(runs.chunk_run, np.diff(runs.first_row))
    weights = (runs.weights / np.bincount(run_of_row))[run_of_row]
    return LabelledVectors(features=runs.features, is_viral=(runs.classes == 0)[run_of_row], weights=weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch, from 1, with means of the losses over its training batches, with dropout, and over the validation records."""

    epoch: int
    train_loss: float
    validation_loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedHead:
    """A head in evaluation mode, that takes features as the models give them.

    Attributes:
        temperature: of frames and chunks; part of the head. None if it is not calibrated.
        best_epoch: the one that the weights come from.
        contig_temperature: intercept and slope over the logarithm of the number of chunks; None for an MLPClassifier, too.
    """

    head: Head
    temperature: float | None
    history: tuple[Epoch, ...]
    best_epoch: int
    contig_temperature: tuple[float, float] | None = None


def train_head(
    train: LabelledVectors, validation: LabelledVectors, settings: TrainerSettings, *, calibrate: bool
) -> TrainedHead:
    """Fits an MLPClassifier with early stopping, and calibrates it, both on the validation frames.

    Where the best temperature is beyond its bounds, the head is not calibrated.
    """
    mean, scale = train.features.mean(0), train.features.std(0) + np.float32(1e-6)
    inputs, held_out = (
        replace(part, features=(part.features - mean) / scale) for part in (train, validation)
    )
    rows, targets = torch.from_numpy(inputs.features), torch.from_numpy(train.is_viral.astype(np.int64))

    def draw() -> list[Tensor]:
        sampled = torch.from_numpy(rng.choice(len(targets), len(targets), p=train.weights))
        # Batch norm needs more than one frame.
        return [batch for batch in sampled.split(_BATCH_FRAMES) if len(batch) > 1]

    def loss(batch: Tensor) -> Tensor:
        return functional.cross_entropy(head(rows[batch]), targets[batch])

    def held_out_loss() -> float:
        margins = margins_of(head, torch.from_numpy(held_out.features))
        return cross_entropy(margins, held_out.is_viral, held_out.weights)

    with _reproducible():
        torch.manual_seed(settings.seed)
        rng = np.random.default_rng((settings.seed, 0))
        head = MLPClassifier(rows.shape[1])
        optimizer = torch.optim.AdamW(head.parameters(), weight_decay=0.5)
        history, best = _fit(head, optimizer, settings, draw, loss, held_out_loss)
        _fold_in(head, torch.from_numpy(mean), torch.from_numpy(scale))
        head.eval().requires_grad_(False)
        temperature = None
        if calibrate:
            margins = margins_of(head, torch.from_numpy(validation.features))
            found = fit_temperature(margins, validation.is_viral, validation.weights)
            if is_within_bounds(found):
                temperature = found
                apply_temperature(head, temperature)
    return TrainedHead(head=head, temperature=temperature, history=tuple(history), best_epoch=best)


def train_contig_head(
    train: LabelledRuns,
    validation: LabelledRuns,
    spec: HeadSpec,
    settings: TrainerSettings,
    *,
    calibrate: bool,
) -> TrainedHead:
    """As `train_head`, of a ContigHead and runs."""
    # An epoch of few frames is longer, or there would be too few steps in all.
    steps = max(40, math.ceil(len(train.features) / _BATCH_FRAMES))
    scale = _BATCH_FRAMES / 1024  # at scale 1, a batch has about 512 chunks of two rows
    sampler = ContigSampler(train.first_chunk, train.weights, train.classes < spec.num_virus)
    features, sizes = torch.from_numpy(train.features), torch.from_numpy(train.sizes)

    def draw() -> list[ContigBatch]:
        return list(itertools.islice(batches, steps))

    def loss(batch: ContigBatch) -> Tensor:
        codes = _codes(head, features[batch.rows], sizes[batch.rows])
        return torch.stack(list(head_losses(head, codes, batch, LossWeights()).values())).sum()

    with _reproducible():
        torch.manual_seed(settings.seed)
        rng = np.random.default_rng((settings.seed, 0))
        held_out = _HeldOut(validation, rng)
        batches = train.batches(sampler.draw(scale, rng) for _ in itertools.count())
        head = ContigHead(spec, dropout=0.3)
        _standardise(head, train)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in head.parameters() if p.ndim > 1]},
            {"params": [p for p in head.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        history, best = _fit(head, optimizer, settings, draw, loss, lambda: held_out.loss(head), max_norm=1.0)
        is_calibrated = calibrate and held_out.calibrate(head)
    head.requires_grad_(False)
    intercept, slope = head.contig_temperature.tolist()
    return TrainedHead(
        head=head,
        temperature=float(head.chunk_temperature) if is_calibrated else None,
        contig_temperature=(intercept, slope) if is_calibrated else None,
        history=tuple(history),
        best_epoch=best,
    )


def _fit(
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: TrainerSettings,
    draw: Callable[[], list[Batch]],
    loss_of: Callable[[Batch], Tensor],
    held_out_loss: Callable[[], float],
    max_norm: float = math.inf,
) -> tuple[list[Epoch], int]:
    """Fits a head until `held_out_loss` stops falling; gives the epochs, and the one that the weights come from.

    `draw` gives the batches of an epoch. The learning rate has a linear warm-up over a tenth of the epochs, then cosine decay.
    """
    history: list[Epoch] = []
    best, best_loss, best_state = 0, math.inf, deepcopy(head.state_dict())
    for epoch in range(1, settings.epochs + 1):
        head.train()
        batches, total = draw(), 0.0
        for step, batch in enumerate(batches):
            done = (epoch - 1 + step / len(batches)) / settings.epochs
            warm_up, decay = min(1.0, 10 * done + 0.05), 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (warm_up * decay)
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), max_norm)
            optimizer.step()
            total += loss.item()
        head.eval()
        mean, held_out = total / max(1, len(batches)), held_out_loss()
        history.append(Epoch(epoch=epoch, train_loss=mean, validation_loss=held_out))
        _log.info("epoch %d: loss %.4f, validation loss %s", epoch, mean, held_out)
        if held_out < best_loss - 1e-4:
            best, best_loss, best_state = epoch, held_out, deepcopy(head.state_dict())
        if epoch - best >= 5:
            break
    head.load_state_dict(best_state)
    head.eval()
    return history, best


@contextmanager
def _reproducible() -> Iterator[None]:
    """Fixes the number of threads; restores it and the random state afterwards."""
    state = torch.get_rng_state()
    with fixed_threads(4):
        try:
            yield
        finally:
            torch.set_rng_state(state)


@torch.no_grad()
def _fold_in(head: MLPClassifier, mean: Tensor, scale: Tensor) -> None:
    """Folds the standardisation of the features into the first layer."""
    layer = head.hidden_layer
    layer.weight.div_(scale)
    layer.bias.sub_(layer.weight @ mean)


@torch.no_grad()
def margins_of(head: MLPClassifier, features: Tensor) -> Float64:
    """Logit of virus minus logit of other, float64 (n,), of features (n, D)."""
    logits = torch.cat([head(rows) for rows in features.split(_ROWS_AT_ONCE)])
    return np.asarray((logits[:, 1] - logits[:, 0]).double().numpy())


def cross_entropy(margins: Float64, is_viral: Bool, weights: Float64) -> float:
    """Sum of the weighted cross-entropies of the log-odds of a virus; all (n,)."""
    return float(weights @ np.logaddexp(0.0, -np.where(is_viral, margins, -margins)))


def fit_temperature(margins: Float64, is_viral: Bool, weights: Float64) -> float:
    """The temperature with the smallest weighted cross-entropy; for margins see `margins_of`, weights (n,) sum to 1."""

    def loss(log_temperature: float) -> float:
        return cross_entropy(margins / np.exp(log_temperature), is_viral, weights)

    bounds = np.log(TEMPERATURE_BOUNDS)
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


def is_within_bounds(*temperatures: float, slope: float = 0.0) -> bool:
    """Whether temperatures, the last of contigs with its slope, are the best ones, and not limits of the search."""
    least, most = TEMPERATURE_BOUNDS
    return all(1.001 * least < t < 0.999 * most for t in temperatures) and abs(slope) < 0.999 * most


def fit_contig_temperature(
    margins: Float64, is_viral: Bool, weights: Float64, num_chunks: Float64 | Int64
) -> Float64:
    """Intercept and slope, over the logarithm of the number of chunks (n,), of the temperature of contigs.

    They have the smallest weighted cross-entropy of the log-odds `margins` (n,); see `ContigHead.contig_margin`.
    """
    log_chunks = np.log(np.maximum(1, num_chunks))

    def loss(parameters: Float64) -> float:
        temperature = np.clip(parameters[0] + parameters[1] * log_chunks, *TEMPERATURE_BOUNDS)
        return cross_entropy(margins / temperature, is_viral, weights) / float(weights.sum())

    found = np.asarray(minimize(loss, np.array([1.0, 0.0]), method="Nelder-Mead").x)
    return np.asarray(np.clip(found, -TEMPERATURE_BOUNDS[1], TEMPERATURE_BOUNDS[1]))


@torch.no_grad()
def apply_temperature(head: MLPClassifier, temperature: float) -> None:
    """Divides the logits of a head by a temperature, inside its output layer; it stays a plain head and no call changes."""
    head.output_layer.weight.div_(temperature)
    head.output_layer.bias.div_(temperature)


class _HeldOut:
    """All chunks of the validation runs, cut into contigs; weights of chunks (C,) and contigs (R,) sum to 1."""

    def __init__(self, data: LabelledRuns, rng: np.random.Generator) -> None:
        pieces = list(cut_runs(data.first_chunk, rng))
        run_of_piece = np.array([run for run, _ in pieces])
        contig_weights = (data.weights / np.bincount(run_of_piece))[run_of_piece]
        chunk_weights = (data.weights / np.diff(data.first_chunk))[data.chunk_run]
        [self.batch] = data.batches([[[piece] for _, piece in pieces]])
        self.rows = torch.from_numpy(data.features), torch.from_numpy(data.sizes)
        self.chunk_weights = chunk_weights / chunk_weights.sum()
        self.contig_weights = contig_weights / contig_weights.sum()

    @torch.no_grad()
    def margins(self, head: ContigHead) -> tuple[Float64, Float64, Float64]:
        """Log-odds of a virus before calibration: of all chunks alone and in context (C,), and of the contigs (R,)."""
        parts = zip(*(values.split(_ROWS_AT_ONCE) for values in self.rows), strict=True)
        codes = torch.cat([_codes(head, *part) for part in parts])
        chunks = head.chunk_codes(codes, torch.from_numpy(self.batch.chunk), len(self.batch.contig))
        contigs = head.contigs(chunks, torch.from_numpy(self.batch.contig), len(self.batch.contig_class))
        alone, context, whole = (
            head.virus_margin(logits).double().numpy()
            for logits in (head.chunk(chunks), contigs.context, contigs.logits)
        )
        return alone, context, whole

    def loss(self, head: ContigHead) -> float:
        """Mean of the weighted cross-entropies of chunks and of contigs, virus or not."""
        alone, _, whole = self.margins(head)
        chunks = cross_entropy(alone, self.batch.chunk_class < head.spec.num_virus, self.chunk_weights)
        contigs = cross_entropy(whole, self.batch.contig_class < head.spec.num_virus, self.contig_weights)
        return (chunks + contigs) / 2

    def calibrate(self, head: ContigHead) -> bool:
        """Sets all temperatures, or none if one is beyond its bounds; whether they are set."""
        margins = self.margins(head)
        is_viral = self.batch.chunk_class < head.spec.num_virus
        alone, context = (fit_temperature(one, is_viral, self.chunk_weights) for one in margins[:2])
        is_viral, num_chunks = self.batch.contig_class < head.spec.num_virus, np.bincount(self.batch.contig)
        intercept, slope = fit_contig_temperature(margins[2], is_viral, self.contig_weights, num_chunks)
        if not is_within_bounds(alone, context, intercept, slope=slope):
            return False
        head.chunk_temperature.fill_(alone)
        head.context_temperature.fill_(context)
        head.contig_temperature.copy_(torch.tensor([intercept, slope]))
        return True


def _codes(head: ContigHead, features: Tensor, sizes: Tensor) -> Tensor:
    dna, protein = features.tensor_split([head.spec.dna_width], dim=1)
    return head.row_codes(dna, protein, sizes)


@torch.no_grad()
def _standardise(head: ContigHead, data: LabelledRuns) -> None:
    """Sets the scales of the head's layer norms so that each of their outputs has mean 0 and SD 1 on the data."""
    parts = np.split(data.features, [head.spec.dna_width], axis=1)
    for norm, vectors in zip((head.dna_norm, head.protein_norm), parts, strict=True):
        blocks = torch.from_numpy(vectors).split(_ROWS_AT_ONCE)
        normed = torch.cat([functional.layer_norm(block, norm.normalized_shape) for block in blocks])
        mean, sd = normed.mean(0), normed.std(0, correction=0) + 1e-6
        norm.weight.copy_(1 / sd)
        norm.bias.copy_(-mean / sd)
