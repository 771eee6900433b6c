"""Fits a ContigHead to labelled runs of chunks and calibrates it; reproducible on the same kind of machine."""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.models.contig_head import ContigHead, HeadSpec
from virnuc_core.training.contigs import (
    ContigBatch,
    ContigSampler,
    LossWeights,
    Run,
    cut_runs,
    fit_contig_temperature,
    head_losses,
    make_batch,
)
from virnuc_core.training.trainer import (
    MIN_IMPROVEMENT,
    Epoch,
    TrainedHead,
    TrainerSettings,
    cross_entropy,
    fit_temperature,
    learning_rate_factor,
    reproducible,
)

_DROPOUT: Final = 0.3
_ROWS_AT_ONCE: Final = 4096
# Rows of a batch at scale 1 of `ContigSampler.draw`, about two a chunk.
_ROWS_OF_SCALE: Final = 1024
# An epoch of few frames is longer, or there would be too few steps in all.
_LEAST_STEPS: Final = 40

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRuns:
    """T runs of chunks, each of one record, with C chunks and N rows in all, in order.

    Attributes:
        features: fp32 (N, F), DNA before protein.
        sizes: int64 (N, 2), see `FrameStore.sizes`.
        first_row: int64 (C + 1,), first row of each chunk, and N.
        first_chunk: int64 (T + 1,), first chunk of each run, and C.
        classes: int64 (T,), index into the classes of the head.
        groups: int64 (T,), related records share a group.
        weights: float64 (T,), sampling probabilities; sum to 1.
    """

    features: npt.NDArray[np.float32]
    sizes: Int64
    first_row: Int64
    first_chunk: Int64
    classes: Int64
    groups: Int64
    weights: Float64

    @property
    def chunk_run(self) -> Int64:
        """int64 (C,): run of each chunk."""
        return np.repeat(np.arange(len(self.classes)), np.diff(self.first_chunk))

    def batches(self, drawn: Iterable[list[list[Run]]]) -> Iterator[ContigBatch]:
        """A batch of each list of contigs, see `make_batch`."""
        classes, groups = self.classes[self.chunk_run], self.groups[self.chunk_run]
        for contigs in drawn:
            yield make_batch(self.first_row, contigs, classes, groups)


@dataclass(frozen=True, slots=True)
class _Margins:
    """Log-odds of a virus before calibration, fp64: of all chunks alone and in context (C,), of the contigs of a batch (R,)."""

    chunks: Float64
    context: Float64
    contigs: Float64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Validation:
    """All chunks of the validation runs, cut into contigs; weights of chunks (C,) and contigs (R,) sum to 1."""

    data: LabelledRuns
    batch: ContigBatch
    chunk_weights: Float64
    contig_weights: Float64
    num_virus: int

    @classmethod
    def cut(cls, data: LabelledRuns, num_virus: int, rng: np.random.Generator) -> "_Validation":
        pieces = list(cut_runs(data.first_chunk, rng))
        run_of_piece = np.array([run for run, _ in pieces])
        contig_weights = (data.weights / np.bincount(run_of_piece))[run_of_piece]
        chunk_weights = (data.weights / np.diff(data.first_chunk))[data.chunk_run]
        [batch] = data.batches([[[piece] for _, piece in pieces]])
        return cls(
            data=data,
            batch=batch,
            chunk_weights=chunk_weights / chunk_weights.sum(),
            contig_weights=contig_weights / contig_weights.sum(),
            num_virus=num_virus,
        )

    @torch.no_grad()
    def margins(self, head: ContigHead) -> _Margins:
        head.eval()
        features, sizes = torch.from_numpy(self.data.features), torch.from_numpy(self.data.sizes)
        parts = zip(features.split(_ROWS_AT_ONCE), sizes.split(_ROWS_AT_ONCE), strict=True)
        codes = torch.cat([_codes(head, *part) for part in parts])
        chunks = head.chunk_codes(codes, torch.from_numpy(self.batch.chunk), len(self.batch.contig))
        contigs = head.contigs(chunks, torch.from_numpy(self.batch.contig), len(self.batch.contig_class))
        logits = (head.chunk(chunks), contigs.context, contigs.logits)
        return _Margins(*(head.virus_margin(part).double().numpy() for part in logits))

    def loss(self, head: ContigHead) -> float:
        """Mean of the weighted cross-entropies of chunks and of contigs, virus or not."""
        margins = self.margins(head)
        chunks = cross_entropy(margins.chunks, self.batch.chunk_class < self.num_virus, self.chunk_weights)
        contigs = cross_entropy(
            margins.contigs, self.batch.contig_class < self.num_virus, self.contig_weights
        )
        return (chunks + contigs) / 2

    def calibrate(self, head: ContigHead) -> None:
        """Sets the temperatures of a head."""
        margins, batch = self.margins(head), self.batch
        is_viral = batch.chunk_class < self.num_virus
        head.chunk_temperature.fill_(fit_temperature(margins.chunks, is_viral, self.chunk_weights))
        head.context_temperature.fill_(fit_temperature(margins.context, is_viral, self.chunk_weights))
        is_viral, num_chunks = batch.contig_class < self.num_virus, np.bincount(batch.contig)
        found = fit_contig_temperature(margins.contigs, is_viral, self.contig_weights, num_chunks)
        head.contig_temperature.copy_(torch.from_numpy(found))


def train_contig_head(
    train: LabelledRuns, validation: LabelledRuns, spec: HeadSpec, settings: TrainerSettings
) -> TrainedHead:
    """Fits a head with early stopping, and calibrates it, both on the validation runs; `settings.members` has no meaning."""
    with reproducible():
        torch.manual_seed(settings.seed)
        rng = np.random.default_rng((settings.seed, 0))
        held_out = _Validation.cut(validation, spec.num_virus, rng)
        head = ContigHead(spec, _DROPOUT)
        _standardise(head, train)
        history, best = _fit(head, train, held_out, settings, rng)
        held_out.calibrate(head)
    head.eval().requires_grad_(False)
    intercept, slope = head.contig_temperature.tolist()
    temperature = float(head.chunk_temperature)
    _log.info("head fitted: best epoch %d, temperature %.3f", best, temperature)
    return TrainedHead(
        head=head,
        temperature=temperature,
        contig_temperature=(intercept, slope),
        history=tuple(history),
        best_epochs=(best,),
    )


def _fit(
    head: ContigHead,
    train: LabelledRuns,
    held_out: _Validation,
    settings: TrainerSettings,
    rng: np.random.Generator,
) -> tuple[list[Epoch], int]:
    """Fits the head; gives the epochs, and the one that the weights come from."""
    parameters: list[dict[str, Any]] = [
        {"params": [p for p in head.parameters() if p.ndim > 1]},
        {"params": [p for p in head.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
    )
    steps = max(_LEAST_STEPS, math.ceil(len(train.features) / settings.batch_frames))
    batches = _batches(train, head.spec.num_virus, settings.batch_frames, rng)
    features, sizes = torch.from_numpy(train.features), torch.from_numpy(train.sizes)
    history: list[Epoch] = []
    best, best_loss = 0, math.inf
    best_state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    for epoch in range(1, settings.epochs + 1):
        head.train()
        total = 0.0
        for step in range(steps):
            done = (epoch - 1 + step / steps) / settings.epochs
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * learning_rate_factor(done)
            batch = next(batches)
            codes = _codes(head, features[batch.rows], sizes[batch.rows])
            loss = torch.stack(list(head_losses(head, codes, batch, LossWeights()).values())).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        loss_there = held_out.loss(head)
        history.append(Epoch(member=0, epoch=epoch, train_loss=total / steps, validation_loss=loss_there))
        _log.info("epoch %d: loss %.4f, validation loss %.4f", epoch, total / steps, loss_there)
        if loss_there < best_loss - MIN_IMPROVEMENT:
            best, best_loss = epoch, loss_there
            best_state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        if epoch - best >= settings.patience:
            break
    head.load_state_dict(best_state)
    return history, best


def _batches(
    data: LabelledRuns, num_virus: int, batch_rows: int, rng: np.random.Generator
) -> Iterator[ContigBatch]:
    sampler = ContigSampler(data.first_chunk, data.weights, data.classes < num_virus)
    return data.batches(sampler.draw(batch_rows / _ROWS_OF_SCALE, rng) for _ in itertools.count())


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
