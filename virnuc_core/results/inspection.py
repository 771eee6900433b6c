"""What a file or folder is, and whether it is whole."""

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import h5py

from virnuc_core.checked_hdf5 import Hdf5Kind, recognise_hdf5
from virnuc_core.errors import CheckpointError, DamagedFileError, InputError, MismatchError
from virnuc_core.inference.shard import read_identity, read_shard
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.classifier import classifier_fingerprint, load_classifier
from virnuc_core.models.weights import load_state_dict, read_spec, weights_fingerprint
from virnuc_core.plain_text import visible
from virnuc_core.results.embeddings_file import EmbeddingsFile
from virnuc_core.results.run_check import check_run
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import RunPlan, read_plan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.store_meta import StoreMeta, content_digest

InspectedKind = Literal["run folder", "frame store", "checkpoint", "head", "unknown file"] | Hdf5Kind
Facts = list[tuple[str, str]]

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PICKLE_BEGIN: Final = b"\x80"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found.

    Attributes:
        kind: what it is.
        path: where.
        facts: what it says of itself, as (name, value), in the order to be shown.
        problems: why it is not whole; empty when it is.
    """

    kind: InspectedKind
    path: Path
    facts: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether everything that should be there is there and reads back as written."""
        return not self.problems

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "kind": self.kind,
            "path": str(self.path),
            "whole": self.is_whole,
            "facts": dict(self.facts),
            "problems": list(self.problems),
        }

    @property
    def summary(self) -> str:
        """The same in lines for a person."""
        lines = [f"{self.path}: {self.kind}, {'whole' if self.is_whole else 'not whole'}"]
        lines += [f"  {name}: {' '.join(value.splitlines())}" for name, value in self.facts]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return visible("\n".join(lines))


def inspect_path(path: Path) -> Inspection:
    """Recognises a file or folder by its content, reads all of it, and says what it is.

    Args:
        path: a run folder, frame store, shard, embeddings file, model checkpoint or classifier head.

    Raises:
        InputError: there is nothing at `path`.
    """
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(f"there is nothing at {path} that can be read: give an existing file or folder.")
    if path.is_dir():
        if RunFolder(path).plan.exists():
            return _inspected("run folder", path, _run_folder)
        if StoreMeta.is_in(path):
            return _inspected("frame store", path, _frame_store)
        return _inspected("checkpoint", path, _checkpoint)
    if h5py.is_hdf5(path):
        kind = recognise_hdf5(path)
        return _inspected(kind, path, _HDF5_READERS.get(kind, _unreadable_hdf5))
    if not _may_hold_weights(path):
        return _inspected("unknown file", path, _unknown)
    head = _inspected("head", path, _head)
    return head if head.is_whole else _inspected("checkpoint", path, _checkpoint)


def _inspected(kind: InspectedKind, path: Path, read: Callable[[Path, Facts], list[str]]) -> Inspection:
    """Runs one reader; what it raises is the last problem, and facts found before are kept."""
    facts: Facts = []
    try:
        problems = read(path, facts)
    except (CheckpointError, DamagedFileError, MismatchError) as error:
        problems = [str(error)]
    return Inspection(kind=kind, path=path, facts=tuple(facts), problems=tuple(problems))


def _run_folder(path: Path, facts: Facts) -> list[str]:
    folder = RunFolder(path)
    plan = read_plan(folder.plan)
    facts += _plan_facts(plan)
    findings = list(check_run(folder, thorough=False))
    whole = sum(found.state == "whole" and found.path.parent == folder.shards for found in findings)
    facts.append(("shards", f"{whole} of {len(plan.shards)} whole"))
    return [found.message for found in findings if found.is_bad]


def _plan_facts(plan: RunPlan) -> Facts:
    facts = [
        ("kind", plan.kind),
        ("plan fingerprint", plan.fingerprint),
        ("inputs", ", ".join(file.name for file in plan.inputs)),
        ("chunk length", f"{plan.chunk_length} bp" if plan.chunk_length else "whole sequences"),
    ]
    for model in plan.models:
        layers = f"layer {model.repr_layer} of {model.spec.num_layers}"
        facts.append((f"{model.family} model", f"{model.name} ({layers}, width {model.spec.embedding_dim})"))
        facts.append((f"{model.family} arithmetic", model.arithmetic))
    for part in plan.continued:
        arithmetic = "; ".join(f"{model.family} {model.arithmetic}" for model in part.models)
        facts.append((f"arithmetic of {len(part.shards)} of {len(plan.shards)} shards", arithmetic))
    facts += [(kind, head.name) for kind, head in (("head", plan.head), ("DNA head", plan.dna_head)) if head]
    facts.append(("rows", str(plan.num_rows)))
    facts.append(("virnuc version", plan.virnuc_version))
    return facts


def _frame_store(path: Path, facts: Facts) -> list[str]:
    store = FrameStore.open(path)
    meta = store.meta
    facts += [
        ("inputs", ", ".join(file.name for file in meta.inputs)),
        ("records", f"{meta.num_records} used, {meta.num_rejected} rejected"),
        ("chunks", str(meta.num_chunks)),
        ("frames", str(meta.num_frames)),
        ("chunk length", f"{meta.chunk_length} bp" if meta.chunk_length else "whole sequences"),
    ]
    if content_digest(path) != meta.content_sha256:
        return [f"the columns of {path} were altered after they were written: delete it and run again."]
    return []


def _shard(path: Path, facts: Facts) -> list[str]:
    identity = read_identity(path)
    facts += [
        ("plan fingerprint", identity["plan_fingerprint"]),
        ("shard", str(identity["index"])),
        ("rows", f"{identity['begin']} to {identity['end'] - 1}"),
        ("models", ", ".join(f"{m['name']} ({m['precision']})" for m in identity["models"])),
        ("virnuc version", identity["virnuc_version"]),
    ]
    read_shard(path, identity)
    return []


def _embeddings(path: Path, facts: Facts) -> list[str]:
    with EmbeddingsFile(path) as file:
        facts += [(name, str(value)) for name, value in file.attributes.items()]
        facts += [("datasets", ", ".join(file.names)), ("rows", str(file.num_rows))]
        file.verify()
    return []


def _checkpoint(path: Path, facts: Facts) -> list[str]:
    checkpoint = resolve_checkpoint(str(path), None)
    facts += [("family", checkpoint.family), ("weights fingerprint", weights_fingerprint(checkpoint))]
    spec = read_spec(checkpoint)
    facts += [
        ("layers", str(spec.num_layers)),
        ("width", str(spec.embedding_dim)),
        ("heads", str(spec.num_heads)),
        ("vocabulary", str(spec.vocab_size)),
    ]
    load_state_dict(checkpoint)
    return []


def _head(path: Path, facts: Facts) -> list[str]:
    classifier = load_classifier(path)
    facts += [("features", str(classifier.in_features)), ("fingerprint", classifier_fingerprint(path))]
    return []


def _unreadable_hdf5(path: Path, facts: Facts) -> list[str]:
    return [f"{path} holds nothing that virnuc can read: give a file that virnuc wrote, or make it again."]


def _unknown(path: Path, facts: Facts) -> list[str]:
    return [
        f"{path} is no shard, embeddings file, model checkpoint or classifier head. Give one of these, or the "
        "whole folder of a run or of a model."
    ]


def _may_hold_weights(path: Path) -> bool:
    """Whether a file is named like weights or begins like a file of torch.save."""
    if path.suffix in _WEIGHT_SUFFIXES:
        return True
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    with path.open("rb") as file:
        return file.read(1) == _PICKLE_BEGIN


_HDF5_READERS: Final[dict[Hdf5Kind, Callable[[Path, Facts], list[str]]]] = {
    "shard": _shard,
    "embeddings file": _embeddings,
}
