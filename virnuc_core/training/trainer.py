"""Fits an MLPClassifier to labelled vectors and calibrates it; reproducible on the same kind of machine."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import functional

from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.models.contig_head import TEMPERATURE_BOUNDS
from virnuc_core.models.heads import Head, fixed_threads

_ROWS_AT_ONCE: Final = 4096
_THREADS: Final = 4
MIN_IMPROVEMENT: Final = 1e-4  # of the validation loss

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Everything that decides the fit, apart from the vectors.

    Attributes:
        seed: of weights, dropout and sampling.
        members: ensemble size: heads of 512 hidden units, fitted from different seeds and merged into one that gives the mean of
            their logits.
        epochs: at most; an epoch samples as many frames as there are.
        patience: epochs without a smaller validation loss after which a fit ends.
        batch_frames: batch size.
        learning_rate: peak; linear warm-up over a tenth of the epochs, then cosine decay.
        weight_decay: of AdamW.
    """

    seed: int = 0
    members: int = 2
    epochs: int = 20
    patience: int = 5
    batch_frames: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledVectors:
    """n frames whose class is known: features (n, D), DNA before protein, and sampling probabilities (n,)."""

    features: npt.NDArray[np.float32]
    is_viral: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch of one ensemble member; members are numbered from 0, epochs from 1.

    The losses are mean cross-entropies: of training frames with dropout, and of validation frames weighted (None without any).
    """

    member: int
    epoch: int
    train_loss: float
    validation_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedHead:
    """A calibrated head, in evaluation mode, that takes features as the models give them.

    Attributes:
        temperature: of frames and chunks; part of the head.
        best_epochs: the epoch that each member's weights come from.
        contig_temperature: intercept and slope over the logarithm of the number of chunks; None for an MLPClassifier.
    """

    head: Head
    temperature: float
    history: tuple[Epoch, ...]
    best_epochs: tuple[int, ...]
    contig_temperature: tuple[float, float] | None = None


def train_head(
    train: LabelledVectors, validation: LabelledVectors | None, settings: TrainerSettings
) -> TrainedHead:
    """Fits a head with early stopping, and calibrates it, both on the validation frames.

    Without validation, for models trained on everything, which would be overconfident on any part of it, all epochs are run, the
    last weights are used, and the temperature stays 1.
    """
    mean, scale = train.features.mean(0), train.features.std(0) + np.float32(1e-6)
    with reproducible():
        history: list[Epoch] = []
        members: list[MLPClassifier] = []
        best_epochs: list[int] = []
        inputs = _standardised(train, mean, scale)
        holdout = None if validation is None else _standardised(validation, mean, scale)
        for number in range(settings.members):
            member, epochs, best = _fit_member(inputs, holdout, settings, number)
            members.append(member)
            history += epochs
            best_epochs.append(best)
        head = _merge(members)
        _fold_in(head, torch.from_numpy(mean), torch.from_numpy(scale))
        head.eval().requires_grad_(False)
        temperature = 1.0
        if validation is not None:
            margins = margins_of(head, torch.from_numpy(validation.features))
            temperature = fit_temperature(margins, validation.is_viral, validation.weights)
            apply_temperature(head, temperature)
    _log.info("head fitted: best epochs %s, temperature %.3f", best_epochs, temperature)
    return TrainedHead(
        head=head,
        temperature=temperature,
        history=tuple(history),
        best_epochs=tuple(best_epochs),
    )


@torch.no_grad()
def margins_of(head: MLPClassifier, features: Tensor) -> npt.NDArray[np.float64]:
    """Logit of virus minus logit of other, float64 (n,), of features (n, D)."""
    logits = torch.cat([head(rows) for rows in features.split(_ROWS_AT_ONCE)])
    return np.asarray((logits[:, 1] - logits[:, 0]).double().numpy())


def cross_entropy(
    margins: npt.NDArray[np.float64], is_viral: npt.NDArray[np.bool_], weights: npt.NDArray[np.float64]
) -> float:
    """Sum of the weighted cross-entropies of the log-odds of a virus; all (n,)."""
    return float(weights @ np.logaddexp(0.0, -np.where(is_viral, margins, -margins)))


def fit_temperature(
    margins: npt.NDArray[np.float64], is_viral: npt.NDArray[np.bool_], weights: npt.NDArray[np.float64]
) -> float:
    """The temperature with the smallest weighted cross-entropy; for margins see `margins_of`, weights (n,) sum to 1."""

    def loss(log_temperature: float) -> float:
        return cross_entropy(margins / np.exp(log_temperature), is_viral, weights)

    bounds = np.log(TEMPERATURE_BOUNDS)
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


@torch.no_grad()
def apply_temperature(head: MLPClassifier, temperature: float) -> None:
    """Divides the logits of a head by a temperature, inside its output layer; it stays a plain head and no call changes."""
    head.output_layer.weight.div_(temperature)
    head.output_layer.bias.div_(temperature)


@contextmanager
def reproducible() -> Iterator[None]:
    """Fixes the number of threads; restores it and the random state afterwards."""
    state = torch.get_rng_state()
    with fixed_threads(_THREADS):
        try:
            yield
        finally:
            torch.set_rng_state(state)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """Standardised features (n, D), classes (n,), and sampling probabilities (n,)."""

    features: Tensor
    targets: Tensor
    weights: npt.NDArray[np.float64]


def _fit_member(
    train: _Inputs, validation: _Inputs | None, settings: TrainerSettings, number: int
) -> tuple[MLPClassifier, list[Epoch], int]:
    """A fitted member, its epochs, and the epoch that its weights come from."""
    torch.manual_seed(settings.seed + number)
    rng = np.random.default_rng((settings.seed, number))
    head = MLPClassifier(train.features.shape[1])
    optimizer = torch.optim.AdamW(
        head.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
    )
    history: list[Epoch] = []
    best, best_loss = 0, math.inf
    best_state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    for epoch in range(1, settings.epochs + 1):
        sampled = torch.from_numpy(rng.choice(len(train.targets), len(train.targets), p=train.weights))
        loss = _run_epoch(head, optimizer, train, sampled, epoch, settings)
        holdout_loss = None if validation is None else _weighted_loss(head, validation)
        history.append(Epoch(member=number, epoch=epoch, train_loss=loss, validation_loss=holdout_loss))
        _log.info("epoch %d: loss %.4f, validation loss %s", epoch, loss, holdout_loss)
        if holdout_loss is None or holdout_loss < best_loss - MIN_IMPROVEMENT:
            best, best_loss = epoch, best_loss if holdout_loss is None else holdout_loss
            best_state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        if epoch - best >= settings.patience:
            break
    head.load_state_dict(best_state)
    return head, history, best


def _run_epoch(
    head: MLPClassifier,
    optimizer: torch.optim.Optimizer,
    train: _Inputs,
    sampled: Tensor,
    epoch: int,
    settings: TrainerSettings,
) -> float:
    head.train()
    # Batch norm needs more than one frame.
    batches = [rows for rows in sampled.split(settings.batch_frames) if len(rows) > 1]
    total = 0.0
    for step, rows in enumerate(batches):
        done = (epoch - 1 + step / len(batches)) / settings.epochs
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_factor(done)
        loss = functional.cross_entropy(head(train.features[rows]), train.targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    return total / max(1, sum(map(len, batches)))


def learning_rate_factor(done: float) -> float:
    """Learning rate relative to the peak, at a fraction of all epochs."""
    return min(1.0, 10 * done + 0.05) * 0.5 * (1 + math.cos(math.pi * done))


def _weighted_loss(head: MLPClassifier, validation: _Inputs) -> float:
    head.eval()
    margins = margins_of(head, validation.features)
    return cross_entropy(margins, validation.targets.numpy() == 1, validation.weights)


def _standardised(
    labelled: LabelledVectors, mean: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]
) -> _Inputs:
    return _Inputs(
        features=torch.from_numpy((labelled.features - mean) / scale),
        targets=torch.from_numpy(labelled.is_viral.astype(np.int64)),
        weights=labelled.weights,
    )


@torch.no_grad()
def _merge(members: list[MLPClassifier]) -> MLPClassifier:
    """Concatenates the members' hidden units into one head, which gives the mean of their logits."""
    merged = MLPClassifier(members[0].in_features, sum(m.hidden_layer.out_features for m in members))
    states = [member.state_dict() for member in members]
    state = {name: torch.cat([s[name] for s in states]) for name in states[0] if states[0][name].ndim}
    state["output_layer.weight"] = torch.cat([s["output_layer.weight"] for s in states], 1) / len(members)
    state["output_layer.bias"] = torch.stack([s["output_layer.bias"] for s in states]).mean(0)
    merged.load_state_dict(state, strict=False)
    return merged


@torch.no_grad()
def _fold_in(head: MLPClassifier, mean: Tensor, scale: Tensor) -> None:
    """Folds the standardisation of the features into the first layer."""
    layer = head.hidden_layer
    layer.weight.div_(scale)
    layer.bias.sub_(layer.weight @ mean)
