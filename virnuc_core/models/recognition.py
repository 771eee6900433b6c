"""What a file or folder of weights is: a model, or a classifier head."""

import os
from pathlib import Path

from virnuc_core.errors import CheckpointError
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.classifier import MLPClassifier, load_classifier
from virnuc_core.models.weights import Checkpoint


def open_weights(path: Path) -> Checkpoint | MLPClassifier:
    """Recognises weights by their content; no code in a file is run.

    Args:
        path: folder or file of a model, or file of a head.

    Raises:
        CheckpointError: there is nothing there, or it is neither.
    """
    if os.path.isdir(path):
        return resolve_checkpoint(str(path.absolute()), None)
    if not os.path.isfile(path):
        raise CheckpointError(f"there is no file or folder {path}: give the path of a model or of a head.")
    try:
        return load_classifier(path)
    except CheckpointError as head_error:
        try:
            return resolve_checkpoint(str(path.absolute()), None)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is neither a head nor a model. As a head: {head_error} As a model: {error}"
            ) from error
