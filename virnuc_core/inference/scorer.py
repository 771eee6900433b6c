"""Scores from vectors: the classifier head, applied in blocks of one fixed shape."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from virnuc_core.models.classifier import MLPClassifier, load_classifier

# Every block has this many rows, the last one filled up with zeros: a matrix product may round a row
# differently when the number of rows is another, and a score should not depend on its neighbours.
_BLOCK_ROWS: Final = 256


class Scorer:
    """A classifier head on one device."""

    def __init__(self, path: Path, device: str) -> None:
        """Loads a head.

        Raises:
            CheckpointError: the file is not a head.
        """
        self._classifier: MLPClassifier = load_classifier(path).to(device)
        self._device = device

    def score(
        self, dna: npt.NDArray[np.floating[Any]], protein: npt.NDArray[np.floating[Any]]
    ) -> npt.NDArray[np.float32]:
        """P(other) and P(virus) of n frames.

        Args:
            dna: (n, D_dna).
            protein: (n, D_protein).

        Returns:
            fp32 (n, 2).

        Raises:
            MismatchError: the head takes features of another width.
        """
        scores = np.empty((len(dna), 2), np.float32)
        block = np.zeros((_BLOCK_ROWS, dna.shape[1] + protein.shape[1]), np.float32)
        for begin in range(0, len(dna), _BLOCK_ROWS):
            end = min(begin + _BLOCK_ROWS, len(dna))
            block[: end - begin, : dna.shape[1]] = dna[begin:end]
            block[: end - begin, dna.shape[1] :] = protein[begin:end]
            block[end - begin :] = 0
            features = torch.from_numpy(block).to(self._device)
            with torch.inference_mode():
                probabilities = self._classifier.virus_probabilities(features)
            scores[begin:end] = probabilities[: end - begin].cpu().numpy()
        return scores
