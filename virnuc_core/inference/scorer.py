"""Scores from vectors: the classifier head, applied in blocks of one fixed shape."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.errors import MismatchError
from virnuc_core.inference.plan import PlannedHead
from virnuc_core.models.classifier import MLPClassifier, classifier_fingerprint, load_classifier

# Every block has this many rows, the last one filled up with zeros: a matrix product may round a row
# differently when the number of rows is another, and a score should not depend on its neighbours.
_BLOCK_ROWS: Final = {"cpu": 256, "cuda": 4096}


class Scorer:
    """A classifier head on one device, and one for rows of which there is the DNA alone, where that is asked for."""

    def __init__(self, path: Path, device: torch.device | str, dna_path: Path | None = None) -> None:
        """Loads the heads.

        Args:
            path: the head for frames.
            device: where to compute.
            dna_path: the head for rows without a protein vector, that is, with a vector of zeros.

        Raises:
            CheckpointError: a file is not a head.
        """
        self._classifier: MLPClassifier = load_classifier(path).to(device)
        self._dna_classifier = None if dna_path is None else load_classifier(dna_path).to(device)
        self._device = torch.device(device)
        self._block_rows = _BLOCK_ROWS[self._device.type]

    def score(
        self, dna: npt.NDArray[np.floating[Any]], protein: npt.NDArray[np.floating[Any]] | None = None
    ) -> npt.NDArray[np.float32]:
        """P(other) and P(virus) of n rows.

        Args:
            dna: (n, D_dna), or both vectors side by side.
            protein: (n, D_protein); None for a head that takes the DNA vector alone, and where `dna` is both.

        Returns:
            fp32 (n, 2).

        Raises:
            MismatchError: a head takes features of another width.
        """
        given = [x for x in (dna, protein) if x is not None]
        vectors = [torch.from_numpy(x.astype(np.float32)).to(self._device) for x in given]
        scores: npt.NDArray[np.float32] = self.launch(*vectors).cpu().numpy()
        return scores

    def launch(self, dna: Tensor, protein: Tensor | None = None) -> Tensor:
        """As `score`, for fp32 tensors on the head's device and with the result on it; waits for nothing."""
        if protein is None:
            return self._apply(self._classifier, dna)
        scores = self._apply(self._classifier, dna, protein)
        if self._dna_classifier is None:
            return scores
        has_protein = protein.any(dim=1, keepdim=True)
        return torch.where(has_protein, scores, self._apply(self._dna_classifier, dna))

    def _apply(self, classifier: MLPClassifier, *vectors: Tensor) -> Tensor:
        """fp32 (n, 2) of the vectors (n, D_1), (n, D_2), ... that are the features side by side."""
        scores = [torch.empty((0, 2), device=self._device)]
        for rows in zip(*(part.split(self._block_rows) for part in vectors), strict=True):
            features = torch.cat(rows, dim=1)
            block = functional.pad(features, (0, 0, 0, self._block_rows - len(features)))
            scores.append(classifier.virus_probabilities(block)[: len(features)])
        return torch.cat(scores)


def require_same_head(planned: PlannedHead) -> None:
    """Checks that a head is the planned one.

    Raises:
        CheckpointError: it cannot be read.
        MismatchError: it has changed since the plan was made.
    """
    if (found := classifier_fingerprint(Path(planned.location))) != planned.fingerprint:
        raise MismatchError(
            f"head {planned.name} ({planned.location}) has changed since the run was planned: fingerprint "
            f"{planned.fingerprint[:12]}, now {found[:12]}. Put the old one back, start over with --force, or move "
            "the run to the new one with `virnuc reprocess`."
        )
