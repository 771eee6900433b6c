"""Scores from vectors: the classifier head, applied in blocks of one fixed shape."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.models.classifier import MLPClassifier, load_classifier

# Every block has this many rows, the last one filled up with zeros: a matrix product may round a row
# differently when the number of rows is another, and a score should not depend on its neighbours.
_BLOCK_ROWS: Final = {"cpu": 256, "cuda": 4096}


class Scorer:
    """A classifier head on one device."""

    def __init__(self, path: Path, device: torch.device | str) -> None:
        """Loads a head.

        Raises:
            CheckpointError: the file is not a head.
        """
        self._classifier: MLPClassifier = load_classifier(path).to(device)
        self._device = torch.device(device)
        self._block_rows = _BLOCK_ROWS[self._device.type]

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
        features = (torch.from_numpy(x.astype(np.float32)).to(self._device) for x in (dna, protein))
        scores: npt.NDArray[np.float32] = self.launch(*features).cpu().numpy()
        return scores

    def launch(self, dna: Tensor, protein: Tensor) -> Tensor:
        """As `score`, for fp32 tensors on the head's device and with the result on it; waits for nothing."""
        scores = [torch.empty((0, 2), device=self._device)]
        for rows in zip(dna.split(self._block_rows), protein.split(self._block_rows), strict=True):
            features = torch.cat(rows, dim=1)
            block = functional.pad(features, (0, 0, 0, self._block_rows - len(features)))
            scores.append(self._classifier.virus_probabilities(block)[: len(features)])
        return torch.cat(scores)
