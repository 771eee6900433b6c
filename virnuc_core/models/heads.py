"""Heads of both kinds: MLPClassifier for open reading frames, ContigHead for the longest stop-free stretches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from virnuc_core.models.catalogue import read_purpose
from virnuc_core.models.classifier import MLPClassifier, load_classifier, save_classifier
from virnuc_core.models.contig_head import ContigHead, load_contig_head, save_contig_head

Head = MLPClassifier | ContigHead


def load_head(path: Path) -> Head:
    """Reads a head of the kind that its file states, in evaluation mode.

    Raises:
        CheckpointError: the file is damaged, or is no head.
    """
    return load_contig_head(path) if read_purpose(path).frames == "longest" else load_classifier(path)


def save_head(head: Head, path: Path, facts: Mapping[str, Any]) -> None:
    """Writes a head as fp32 safetensors, atomically and reproducibly; `facts` go into the metadata as JSON."""
    if isinstance(head, ContigHead):
        save_contig_head(head, path, facts)
    else:
        save_classifier(head, path, facts)


def describe_inputs(head: Head) -> str:
    """What a head takes, in words."""
    if isinstance(head, ContigHead):
        return f"DNA and protein vectors of {head.spec.dna_width} and {head.spec.protein_width} numbers"
    return f"{head.in_features} features"


def takes_widths(head: Head, dna: int, protein: int) -> bool:
    """Whether a head takes DNA and protein vectors of these widths."""
    if isinstance(head, ContigHead):
        return (head.spec.dna_width, head.spec.protein_width) == (dna, protein)
    return head.in_features == dna + protein


@contextmanager
def fixed_threads(number: int) -> Iterator[None]:
    """Has torch compute with so many threads in this one.

    Rounding of matrix products depends on their number, and a head is to give the same bits on machines with any number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
