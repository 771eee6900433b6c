"""Whether a model or a head is whole: its hashes as far as they are known, its structure, its numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virnuc_core.errors import CheckpointError, DamagedFileError
from virnuc_core.models.catalogue import BUNDLED_HEADS, CatalogueEntry, find_entries, split_family
from virnuc_core.models.checkpoints import location_of, resolve_checkpoint
from virnuc_core.models.checksums import check_hashes
from virnuc_core.models.classifier import MLPClassifier, classifier_fingerprint
from virnuc_core.models.recognition import open_weights
from virnuc_core.models.tensor_files import is_finite
from virnuc_core.models.weights import (
    Checkpoint,
    load_state_dict,
    read_spec,
    tokenizer_path,
    weights_fingerprint,
)
from virnuc_core.specs import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What was found of one model or head.

    Attributes:
        name: as it was asked for.
        location: where it lies; None when it is not on this machine.
        fingerprint: SHA-256 (hex) that plans and runs know it by; empty when it was not computed.
        facts: what it is, in a line.
        hashes_from: where hashes of its files are known from; empty when none are.
        problems: why it is not whole; empty when it is.
    """

    name: str
    location: Path | None
    fingerprint: str
    facts: str
    hashes_from: str
    problems: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "name": self.name,
            "location": str(self.location) if self.location else None,
            "whole": self.is_whole,
            "facts": self.facts,
            "fingerprint": self.fingerprint or None,
            "hashes_from": self.hashes_from or None,
            "problems": list(self.problems),
        }

    @property
    def summary(self) -> str:
        """The same in lines for a person."""
        lines = [f"{self.name}: {'whole' if self.is_whole else 'not whole'}"]
        lines += [f"  {self.facts}"] if self.facts else []
        lines += [f"  in {self.location}"] if self.location else []
        if self.fingerprint:
            known = (
                f"hashes as in {self.hashes_from}" if self.hashes_from else "no hashes are known of its files"
            )
            lines += [f"  fingerprint {self.fingerprint}, {known}"]
        return "\n".join([*lines, *(f"  problem: {problem}" for problem in self.problems)])


def verify(name_or_path: str) -> Verification:
    """Reads all of a model or head that is on this machine; nothing is fetched.

    Args:
        name_or_path: catalogue name, with or without `esm2:` or `dnabert:`, bundled head, or a path.
    """
    location: Path | None = None
    try:
        location, entry = find_here(name_or_path)
        return _verified(name_or_path, location, entry)
    except (CheckpointError, DamagedFileError) as error:
        return Verification(
            name=name_or_path,
            location=location,
            fingerprint="",
            facts="",
            hashes_from="",
            problems=(str(error),),
        )


def find_here(name_or_path: str) -> tuple[Path, CatalogueEntry | None]:
    """Where a model or head lies on this machine, and what the catalogue says of it.

    Raises:
        CheckpointError: it is not here, or the name is that of two models.
    """
    if name_or_path in BUNDLED_HEADS:
        return BUNDLED_HEADS[name_or_path], None
    family, name = split_family(name_or_path)
    entries = find_entries(name, family)
    if len(entries) > 1:
        raise CheckpointError(
            f"{name} is the name of an ESM-2 and of a DNABERT-S model: give esm2:{name} or dnabert:{name}."
        )
    if not entries:
        return Path(name).expanduser(), None
    [entry] = entries
    location = location_of(entry)
    if location is None:
        raise CheckpointError(f"{name} is not on this machine: virnuc models pull {name} fetches it.")
    return location, entry


def _verified(name: str, location: Path, entry: CatalogueEntry | None) -> Verification:
    weights = open_weights(location) if entry is None else resolve_checkpoint(str(location), entry.family)
    if isinstance(weights, MLPClassifier):
        files: tuple[Path, ...] = (location,)
        fingerprint = classifier_fingerprint(location)
        facts = f"head for {weights.in_features} features"
        problems = []
    else:
        files = tuple(path for path in (*weights.files, weights.config, weights.tokenizer) if path)
        fingerprint = weights_fingerprint(weights)
        spec = read_spec(weights)
        facts = f"{spec.family}, {spec.num_layers} layers, width {spec.embedding_dim}, {spec.num_heads} heads"
        problems = [*_differences(spec, entry), *_broken_numbers(weights)]
    checks = list(check_hashes(files))
    known_from = {check.known_from for check in checks if check.known_from}
    return Verification(
        name=name,
        location=location,
        fingerprint=fingerprint,
        facts=facts,
        hashes_from=", ".join(sorted(known_from)),
        problems=(*(check.problem for check in checks if check.problem), *problems),
    )


def _differences(spec: ModelSpec, entry: CatalogueEntry | None) -> list[str]:
    """How a model differs from what the catalogue says it is."""
    if entry is None:
        return []
    pairs = {
        "layers": (spec.num_layers, entry.num_layers),
        "width": (spec.embedding_dim, entry.embedding_dim),
        "heads": (spec.num_heads, entry.num_heads),
    }
    return [
        f"it has {found} {what} where {entry.name} has {wanted}"
        for what, (found, wanted) in pairs.items()
        if found != wanted
    ]


def _broken_numbers(checkpoint: Checkpoint) -> list[str]:
    """Parameters that hold NaN or infinities; a DNA model needs its tokenizer as well.

    Raises:
        CheckpointError: tensors are missing, unknown or misshapen, or the tokenizer is not there.
    """
    if checkpoint.family == "dnabert_s":
        tokenizer_path(checkpoint)
    return [
        f"{name} holds numbers that are not finite"
        for name, tensor in load_state_dict(checkpoint).items()
        if not is_finite(tensor)
    ]
