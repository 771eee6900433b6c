"""The published classifier head: features of one frame to P(other) and P(virus)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.files import atomic_path, file_digest
from virnuc_core.models.catalogue import HEAD_METADATA
from virnuc_core.models.tensor_files import is_finite, read_pickle, read_tensors, require_backed

HIDDEN_WIDTH: Final = 512
_DROPOUT: Final = 0.5


class MLPClassifier(nn.Module):
    """Linear, BatchNorm, ReLU, Dropout, Linear over features of the DNA vector followed by the protein vector.

    Source: the original VirNucPro's MLPClassifier, whose attribute names these are.
    """

    def __init__(self, in_features: int, hidden_width: int = HIDDEN_WIDTH) -> None:
        super().__init__()
        self.hidden_layer = nn.Linear(in_features, hidden_width)
        self.bn1 = nn.BatchNorm1d(hidden_width)
        self.output_layer = nn.Linear(hidden_width, 2)
        self.dropout = nn.Dropout(_DROPOUT)

    @property
    def in_features(self) -> int:
        """Width D of the features."""
        return self.hidden_layer.in_features

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, 2) of features (n, D)."""
        hidden = functional.relu(self.bn1(self.hidden_layer(features)))
        logits: Tensor = self.output_layer(self.dropout(hidden))
        return logits

    @torch.inference_mode()
    def virus_probabilities(self, features: Tensor) -> Tensor:
        """P(other) and P(virus), fp32 (n, 2), of features fp32 (n, D); the module must be in evaluation mode.

        Raises:
            MismatchError: the features are of another width.
        """
        if features.shape[1] != self.in_features:
            raise MismatchError(
                f"the classifier head takes {self.in_features} features and the models give "
                f"{features.shape[1]} (DNA and protein together). Choose the head that was trained on these "
                "models."
            )
        return functional.softmax(self(features), dim=1)


class _PickledModule:
    """Stands in for every module class of a pickled head: keeps the attributes and does nothing."""


_STAND_INS: Final = tuple(
    (_PickledModule, name)
    for name in (
        "__main__.MLPClassifier",
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.batchnorm.BatchNorm1d",
        "torch.nn.modules.activation.ReLU",
        "torch.nn.modules.dropout.Dropout",
    )
)


def load_classifier(path: Path) -> MLPClassifier:
    """Reads a head in evaluation mode: a pickled whole `__main__.MLPClassifier`, a state dict, or safetensors.

    Raises:
        CheckpointError: the file is damaged, holds other objects (whose code is not run), or is no such head.
    """
    try:
        state = _read_state(path)
        hidden_width, in_features = state["hidden_layer.weight"].shape
        if 0 in (hidden_width, in_features) or any(tensor.is_complex() for tensor in state.values()):
            raise ValueError("its tensors are empty or complex")
        for name, weights in state.items():
            if not is_finite(weights):
                raise ValueError(f"{name} holds numbers that are not finite")
        if (state["bn1.running_var"] < 0).any():
            raise ValueError("bn1.running_var holds numbers below zero")
        classifier = MLPClassifier(in_features, hidden_width)
        state.setdefault("bn1.num_batches_tracked", torch.tensor(0))
        classifier.load_state_dict(state)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an MLPClassifier head (hidden_layer, bn1, output_layer with 2 outputs): {error}. "
            "Give a head of VirNucPro or virnuc."
        ) from error
    return classifier.requires_grad_(False).eval()


def save_classifier(classifier: MLPClassifier, path: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Writes a head as fp32 safetensors, atomically and reproducibly; `facts` go into the metadata as JSON."""
    state = {
        name: tensor.detach().cpu().float().contiguous() for name, tensor in classifier.state_dict().items()
    }
    del state["bn1.num_batches_tracked"]
    # One entry: safetensors writes several in an order that changes from process to process.
    metadata = None if facts is None else {HEAD_METADATA: json.dumps(facts, sort_keys=True)}
    with atomic_path(path) as temporary:
        save_file(state, temporary, metadata=metadata)


def classifier_fingerprint(path: Path) -> str:
    """SHA-256 (hex) of the file of a head."""
    return file_digest(path)


def _read_state(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    content = read_pickle(path, _STAND_INS)
    if isinstance(content, _PickledModule):
        content = _pickled_tensors(content)
    if not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError("it holds more than tensors")
    require_backed(path, content.values())
    return {str(key): value for key, value in content.items()}


def _pickled_tensors(module: _PickledModule) -> dict[str, Tensor]:
    return {
        f"{name}.{own}": tensor
        for name, layer in vars(module)["_modules"].items()
        for own, tensor in {**vars(layer)["_parameters"], **vars(layer)["_buffers"]}.items()
        if tensor is not None
    }
