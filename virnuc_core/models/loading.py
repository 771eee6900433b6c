"""From a checkpoint to a model that is ready to run."""

import logging
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from virnuc_core.errors import CheckpointError
from virnuc_core.models.dnabert_s import DnabertS
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.esm2 import ESM2
from virnuc_core.models.fp8 import quantise_layers
from virnuc_core.models.random_weights import random_state_dict
from virnuc_core.models.tensor_files import is_finite
from virnuc_core.models.weights import Checkpoint, load_state_dict, read_spec
from virnuc_core.specs import ModelSpec, ResolvedPrecision

_log = logging.getLogger(__name__)


def build_model(spec: ModelSpec, dropout: float = 0.0) -> Encoder:
    """A model of this architecture with fresh weights, in training mode.

    Args:
        spec: the architecture; its family decides the class.
        dropout: share of each residual branch dropped in training mode.
    """
    return ESM2(spec, dropout) if spec.family == "esm2" else DnabertS(spec, dropout)


# The dtype of everything but the matrix products of fp8.
_DTYPES: Final[dict[ResolvedPrecision, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}


def load_model(
    checkpoint: Checkpoint, device: torch.device | str, precision: ResolvedPrecision
) -> tuple[Encoder, ModelSpec]:
    """Reads a model, casts it once and moves it once.

    Args:
        checkpoint: from `resolve_checkpoint`.
        device: where the weights go.
        precision: what they are cast to, on the host, before they move.

    Returns:
        The model in evaluation mode, without gradients, and its architecture.

    Raises:
        CheckpointError: the weights are missing, damaged, not finite, or not those of such a model.
    """
    spec = read_spec(checkpoint)
    with torch.device("meta"):
        model = build_model(spec)
    is_random = checkpoint.random_spec is not None
    state = random_state_dict(spec, device) if is_random else load_state_dict(checkpoint)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} does not fit the {spec.family} architecture that its "
            f"configuration describes: {error}"
        ) from error
    model = model.requires_grad_(False).eval().to(_DTYPES[precision]).to(device)
    _require_finite(checkpoint, model, state)
    if precision == "fp8":
        quantise_layers(model)
    else:
        model.prepare_inference()
    _log.info(
        "loaded %s: %d layers, width %d, %s on %s",
        checkpoint.name,
        spec.num_layers,
        spec.embedding_dim,
        precision,
        device,
    )
    return model, spec


def _require_finite(checkpoint: Checkpoint, model: Encoder, state: Mapping[str, Tensor]) -> None:
    """Looks at the weights where they are fast to look at.

    Raises:
        CheckpointError: one of them is not a finite number in the file either; rounding makes some infinite.
    """
    for name, weights in model.state_dict().items():
        if not is_finite(weights) and not is_finite(state[name]):
            raise CheckpointError(
                f"checkpoint {checkpoint.name} is broken: {name} holds numbers that are not finite. Fetch it again."
            )
