"""The fit of a classifier head to labelled vectors: the same numbers for the same data, settings and kind of machine."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.training.calibration import cool, fit_temperature

# Products of matrices are rounded by how they are cut into threads, so this does not follow the machine.
_THREADS: Final = 4
_ROWS_AT_ONCE: Final = 4096
_SMALLEST_GAIN: Final = 1e-4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Everything that decides a head, apart from the vectors.

    Attributes:
        seed: of weights, dropout and draws.
        members: heads that are fitted from different seeds and stand side by side in one, which gives the mean of their
            logits; each has 512 hidden units.
        epochs: most rounds of as many frames as there are.
        patience: rounds without a smaller loss on the validation frames after which a fit ends.
        batch_frames: frames in a step.
        learning_rate: highest; it rises for a tenth of the rounds, and falls as a cosine until the last.
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
    """n frames whose class is known.

    Attributes:
        features: fp32 (n, D), the DNA vector before the protein vector.
        is_viral: bool (n,).
        weights: float64 (n,), how often each is drawn; sums to 1.
    """

    features: npt.NDArray[np.float32]
    is_viral: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One round of one member.

    Attributes:
        member: number of the member, from 0.
        epoch: number of the round, from 1.
        train_loss: mean cross-entropy of the frames learnt from, with dropout.
        validation_loss: weighted mean cross-entropy of the validation frames; None without any.
    """

    member: int
    epoch: int
    train_loss: float
    validation_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedHead:
    """A calibrated head, and how it came about.

    Attributes:
        classifier: in evaluation mode; takes features as the models give them.
        temperature: what its logits were divided by.
        history: every round of every member.
        best_epochs: of each member, the round whose weights it has.
    """

    classifier: MLPClassifier
    temperature: float
    history: tuple[Epoch, ...]
    best_epochs: tuple[int, ...]


def train_head(
    train: LabelledVectors, validation: LabelledVectors | None, settings: TrainerSettings
) -> TrainedHead:
    """Fits a head, stops when it learns nothing more that holds for others, and calibrates it.

    Args:
        train: frames to learn from.
        validation: frames of others; None does all rounds, takes the last weights and leaves the temperature at 1, for
            models that have seen all there is and would be sure of any part of it.
        settings: how.
    """
    mean, scale = train.features.mean(0), train.features.std(0) + np.float32(1e-6)
    with _reproducible():
        history: list[Epoch] = []
        members: list[MLPClassifier] = []
        best_epochs: list[int] = []
        inputs = _standardised(train, mean, scale)
        held_out = None if validation is None else _standardised(validation, mean, scale)
        for number in range(settings.members):
            member, epochs, best = _fit_member(inputs, held_out, settings, number)
            members.append(member)
            history += epochs
            best_epochs.append(best)
        head = _side_by_side(members)
        _fold_in(head, torch.from_numpy(mean), torch.from_numpy(scale))
        head.eval().requires_grad_(False)
        temperature = 1.0
        if validation is not None:
            margins = margins_of(head, torch.from_numpy(validation.features))
            temperature = fit_temperature(margins, validation.is_viral, validation.weights)
            cool(head, temperature)
    _log.info("head fitted: best rounds %s, temperature %.3f", best_epochs, temperature)
    return TrainedHead(
        classifier=head,
        temperature=temperature,
        history=tuple(history),
        best_epochs=tuple(best_epochs),
    )


@torch.no_grad()
def margins_of(head: MLPClassifier, features: Tensor) -> npt.NDArray[np.float64]:
    """Logit of virus minus logit of other, float64 (n,), of features (n, D)."""
    logits = torch.cat([head(rows) for rows in features.split(_ROWS_AT_ONCE)])
    return np.asarray((logits[:, 1] - logits[:, 0]).double().numpy())


@contextmanager
def _reproducible() -> Iterator[None]:
    """Fixed threads and random numbers of its own; what was set before is set again afterwards."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """Standardised features (n, D), classes int64 (n,), and how often each is drawn, float64 (n,)."""

    features: Tensor
    targets: Tensor
    weights: npt.NDArray[np.float64]


def _fit_member(
    train: _Inputs,
    validation: _Inputs | None,
    settings: TrainerSettings,
    number: int,
) -> tuple[MLPClassifier, list[Epoch], int]:
    """A fitted member, its rounds, and which of them its weights are of."""
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
        drawn = torch.from_numpy(rng.choice(len(train.targets), len(train.targets), p=train.weights))
        loss = _run_epoch(head, optimizer, train, drawn, (epoch, settings))
        held_out = None if validation is None else _weighted_loss(head, validation)
        history.append(Epoch(member=number, epoch=epoch, train_loss=loss, validation_loss=held_out))
        _log.info("round %d: loss %.4f, of the validation frames %s", epoch, loss, held_out)
        if held_out is None or held_out < best_loss - _SMALLEST_GAIN:
            best, best_loss = epoch, best_loss if held_out is None else held_out
            best_state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        if epoch - best >= settings.patience:
            break
    head.load_state_dict(best_state)
    return head, history, best


def _run_epoch(
    head: MLPClassifier,
    optimizer: torch.optim.Optimizer,
    train: _Inputs,
    drawn: Tensor,
    progress: tuple[int, TrainerSettings],
) -> float:
    """One pass over the drawn rows; the mean loss."""
    head.train()
    epoch, settings = progress
    # Batch statistics need more than one frame.
    batches = [rows for rows in drawn.split(settings.batch_frames) if len(rows) > 1]
    total = 0.0
    for step, rows in enumerate(batches):
        done = (epoch - 1 + step / len(batches)) / settings.epochs
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(done)
        loss = functional.cross_entropy(head(train.features[rows]), train.targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    return total / max(1, sum(map(len, batches)))


def _rate(done: float) -> float:
    """The learning rate as a share of the highest, when a share of all rounds is done."""
    return min(1.0, 10 * done + 0.05) * 0.5 * (1 + math.cos(math.pi * done))


def _weighted_loss(head: MLPClassifier, validation: _Inputs) -> float:
    head.eval()
    margins = margins_of(head, validation.features)
    signed = np.where(validation.targets.numpy() == 1, margins, -margins)
    return float(validation.weights @ np.logaddexp(0.0, -signed))


def _standardised(
    labelled: LabelledVectors, mean: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]
) -> _Inputs:
    return _Inputs(
        features=torch.from_numpy((labelled.features - mean) / scale),
        targets=torch.from_numpy(labelled.is_viral.astype(np.int64)),
        weights=labelled.weights,
    )


@torch.no_grad()
def _side_by_side(members: list[MLPClassifier]) -> MLPClassifier:
    """One head that gives the mean of the members' logits: their hidden units next to each other."""
    merged = MLPClassifier(members[0].in_features, sum(m.hidden_layer.out_features for m in members))
    states = [member.state_dict() for member in members]
    state = {name: torch.cat([s[name] for s in states]) for name in states[0] if states[0][name].ndim}
    state["output_layer.weight"] = torch.cat([s["output_layer.weight"] for s in states], 1) / len(members)
    state["output_layer.bias"] = torch.stack([s["output_layer.bias"] for s in states]).mean(0)
    merged.load_state_dict(state, strict=False)
    return merged


@torch.no_grad()
def _fold_in(head: MLPClassifier, mean: Tensor, scale: Tensor) -> None:
    """Moves the standardisation of the features into the first layer."""
    layer = head.hidden_layer
    layer.weight.div_(scale)
    layer.bias.sub_(layer.weight @ mean)
