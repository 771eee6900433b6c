"""Temperature: one number that makes scores as sure as they are right, and changes no call."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize_scalar

from virnuc_core.models.classifier import MLPClassifier

# Few or easy validation frames would make it as small as it may be, and every score 0 or 1.
_BOUNDS: Final = (0.25, 20.0)


def fit_temperature(
    margins: npt.NDArray[np.float64], is_viral: npt.NDArray[np.bool_], weights: npt.NDArray[np.float64]
) -> float:
    """The temperature with the smallest weighted cross-entropy.

    Args:
        margins: (n,), logit of virus minus logit of other.
        is_viral: (n,).
        weights: (n,), sums to 1.
    """
    signed = np.where(is_viral, margins, -margins)

    def loss(log_temperature: float) -> float:
        return float(weights @ np.logaddexp(0.0, -signed / np.exp(log_temperature)))

    found = minimize_scalar(loss, bounds=np.log(_BOUNDS), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


@torch.no_grad()
def cool(head: MLPClassifier, temperature: float) -> None:
    """Divides the logits of a head by a temperature, inside its output layer: it stays a plain head."""
    head.output_layer.weight.div_(temperature)
    head.output_layer.bias.div_(temperature)
