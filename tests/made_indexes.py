"""An index of genomes beside a made head."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from virnuc_core.models.catalogue import index_path
from virnuc_core.models.classifier import classifier_fingerprint
from virnuc_core.results.nearest import GenomeIndex, save_index


def made_index(head: Path, embeddings: npt.NDArray[np.float32], **limits: object) -> GenomeIndex:
    """Genomes 0, 1, ... with these embeddings; every third has no family, and every other no group."""
    rows = range(len(embeddings))
    lineages = {
        "class": [f"class {row % 2}" for row in rows],
        "family": [f"family {row}" if row % 3 else "" for row in rows],
        "group": [f"group {row}" if row % 2 else "" for row in rows],
    }
    names = [f"genome {row}" for row in rows]
    index = GenomeIndex.build(embeddings, names, lineages, classifier_fingerprint(head))
    return replace(index, **limits)


def head_with_index(head: Path, folder: Path, embeddings: npt.NDArray[np.float32], **limits: object) -> Path:
    """A copy of a head, with an index beside it."""
    copy = folder / head.name
    shutil.copyfile(head, copy)
    save_index(made_index(copy, embeddings, **limits), index_path(copy))
    return copy
