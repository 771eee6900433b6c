"""Says what a file or folder is, and whether it is intact: `virnuc inspect`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py

from virnuc_core.checked_hdf5 import CHECKSUM_SUFFIX, recognise_hdf5
from virnuc_core.errors import CheckpointError, DamagedFileError, InputError, MismatchError
from virnuc_core.files import file_digest
from virnuc_core.inference.plan import RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards, read_identity, read_shard, shard_identity
from virnuc_core.models.catalogue import NOT_CALIBRATED, read_purpose
from virnuc_core.models.heads import load_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.plain_text import visible
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.run_json import file_record, read_records
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore, StoreMeta, content_digest
from virnuc_core.sequences.reader import iter_records, reading_text, rejection_reason
from virnuc_core.specs import FRAMES_IN_WORDS, chunks_in_words

Facts = Iterator[tuple[str, str]]

_RUN_AGAIN: Final = "run the same command again"
_PROBLEM: Final = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a file or folder is, facts about it by name, and why it is not intact."""

    kind: str
    path: Path
    facts: dict[str, str]
    problems: tuple[str, ...]

    @property
    def is_intact(self) -> bool:
        """Whether everything is there and as it was written."""
        return not self.problems

    @property
    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "kind": self.kind,
            "path": str(self.path),
            "intact": self.is_intact,
            "facts": self.facts,
            "problems": list(self.problems),
        }

    @property
    def summary(self) -> str:
        """As text."""
        lines = [f"{self.path}: {self.kind}, {'intact' if self.is_intact else 'not intact'}"]
        lines += [f"  {name}: {' '.join(value.splitlines())}" for name, value in self.facts.items()]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return visible("\n".join(lines))


def inspect_path(path: Path) -> Inspection:
    """Recognises a file or folder by its content and reads all of it.

    Raises:
        InputError: there is nothing at `path`.
    """
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(f"{path} does not exist or cannot be read: give an existing file or folder.")
    for kind in _possible_kinds(path):
        found = list(_with_errors(_READERS.get(kind, _refuse)(path)))
        problems = tuple(value for name, value in found if name == _PROBLEM)
        if not problems:
            break
    facts = {name: value for name, value in found if name != _PROBLEM}
    return Inspection(kind=kind, path=path, facts=facts, problems=problems)


def _with_errors(facts: Facts) -> Facts:
    """The facts, and if reading them fails the error as the last one."""
    try:
        yield from facts
    except (DamagedFileError, CheckpointError, MismatchError, InputError) as error:
        yield _PROBLEM, str(error)


def _possible_kinds(path: Path) -> tuple[str, ...]:
    """Candidates for the kind of a file or folder; one that can be read as none of them is reported as the last."""
    if path.is_dir():
        if RunFolder(path).plan.exists():
            return ("run folder",)
        return ("frame store",) if StoreMeta.is_in(path) else ("checkpoint",)
    if h5py.is_hdf5(path):
        return (recognise_hdf5(path),)
    with path.open("rb") as file:
        is_pickled = file.read(2).startswith((b"\x80", b"PK"))  # a pickle, or a zip file of some
    if is_pickled or path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        return "head", "checkpoint"
    try:
        with reading_text(str(path)) as text:
            is_sequence = text.peek(64)[:64].lstrip()[:1] in (b">", b"@")
    except InputError:
        is_sequence = True  # compressed, and damaged
    return ("sequence file",) if is_sequence else ("unknown file",)


def _read_run(path: Path) -> Facts:
    """Reads every shard with its checksums, and compares the results with the checksums in run.json."""
    folder = RunFolder(path)
    plan = read_plan(folder.plan)
    yield from _plan_facts(plan)
    yield from _with_errors(_read_frames(folder, plan))
    missing = set(missing_shards(folder, [shard.index for shard in plan.shards]))
    num_intact = 0
    for shard in plan.shards:
        if shard.index not in missing:
            try:
                read_shard(folder.shard(shard.index), shard_identity(plan, shard))
                num_intact += 1
            except (DamagedFileError, MismatchError) as error:
                yield _PROBLEM, str(error)
    yield "shards", f"{num_intact} of {len(plan.shards)} intact"
    if missing:
        left = f"{len(missing)} of {len(plan.shards)} shards are not computed yet"
        yield _PROBLEM, f"{left}: {_RUN_AGAIN}."
    if not folder.report.exists():
        yield _PROBLEM, f"{folder.report} is missing, so the run is not finished: {_RUN_AGAIN}."
    else:
        yield from _with_errors(_read_results(folder, plan))


def _read_frames(folder: RunFolder, plan: RunPlan) -> Facts:
    store = FrameStore.open(folder.frames)
    _require_unaltered(store)
    if store.meta.content_sha256 != plan.input_digest:
        other = f"{folder.frames} does not contain the sequences of the run's plan"
        yield _PROBLEM, f"{other}: delete it and run again."


def _require_unaltered(store: FrameStore) -> None:
    if content_digest(store.folder) != store.meta.content_sha256:
        raise DamagedFileError(
            f"the columns of {store.folder} were modified after they were written: delete it and run again."
        )


def _read_results(folder: RunFolder, plan: RunPlan) -> Facts:
    for name, record in read_records(folder.report).items():
        path = folder.root / name if plan.kind == "predict" else folder.embedded
        if not path.exists():
            yield _PROBLEM, f"{path} is missing: {_RUN_AGAIN}."
        else:
            yield from _with_errors(_read_result(path, record))


def _read_result(path: Path, record: object) -> Facts:
    if h5py.is_hdf5(path):
        with Embeddings(path, own=True) as file:
            file.verify()
    if file_record(path) != record:
        yield _PROBLEM, f"{path} was modified after run.json was written: {_RUN_AGAIN}."


def _plan_facts(plan: RunPlan) -> Facts:
    yield "kind", plan.kind
    yield "plan fingerprint", plan.fingerprint
    yield "inputs", ", ".join(file.name for file in plan.inputs)
    yield "chunk length", chunks_in_words(plan.chunk_length)
    if plan.chunk_length:
        yield "frames", FRAMES_IN_WORDS[plan.frames]
    for model in plan.models:
        layers = f"layer {model.repr_layer} of {model.spec.num_layers}"
        yield f"{model.family} model", f"{model.name} ({layers}, width {model.spec.embedding_dim})"
        yield f"{model.family} arithmetic", model.arithmetic
    if plan.head:
        yield "head", plan.head.name
    yield "rows", str(plan.num_rows)
    yield "virnuc version", plan.virnuc_version


def _read_store(path: Path) -> Facts:
    store = FrameStore.open(path)
    meta = store.meta
    yield "inputs", ", ".join(file.name for file in meta.inputs)
    yield "records", f"{meta.num_records} used, {meta.num_rejected} rejected"
    yield "chunks", str(meta.num_chunks)
    yield "frames", str(meta.num_frames)
    yield "chunk length", chunks_in_words(meta.chunk_length)
    _require_unaltered(store)


def _read_shard(path: Path) -> Facts:
    identity = read_identity(path)
    yield "plan fingerprint", identity["plan_fingerprint"]
    yield "shard", str(identity["index"])
    yield "rows", f"{identity['begin']} to {identity['end'] - 1}"
    yield "models", ", ".join(f"{model['name']} ({model['precision']})" for model in identity["models"])
    yield "virnuc version", identity["virnuc_version"]
    read_shard(path, identity)


def _read_embeddings(path: Path) -> Facts:
    with Embeddings(path, own=True) as file:
        for name, value in file.attrs.items():
            if not name.endswith(CHECKSUM_SUFFIX):
                yield name, str(value)
        yield "datasets", ", ".join(file.names)
        yield "rows", str(len(file))
        file.verify()


def _read_checkpoint(path: Path) -> Facts:
    checkpoint = open_checkpoint(str(path), None)
    spec = checkpoint.spec
    yield "family", checkpoint.family
    yield "weights fingerprint", checkpoint.fingerprint
    yield "layers", str(spec.num_layers)
    yield "width", str(spec.embedding_dim)
    yield "heads", str(spec.num_heads)
    yield "vocabulary", str(spec.vocab_size)
    checkpoint.published_parts()


def _read_head(path: Path) -> Facts:
    head = load_head(path)
    yield "frames", FRAMES_IN_WORDS[head.frames]
    yield "takes", head.takes
    if head.classes:
        yield "classes", ", ".join(head.classes)
    if not read_purpose(path).calibrated:
        yield "warning", f"it {NOT_CALIBRATED}"
    yield "fingerprint", file_digest(path)


def _read_sequences(path: Path) -> Facts:
    records = bases = usable = 0
    for record in iter_records([path], "dna"):
        records, bases = records + 1, bases + len(record.sequence)
        usable += rejection_reason(record.sequence, "dna") is None
    yield "records", f"{records}, {usable} of them DNA"
    yield "letters", str(bases)


def _refuse(path: Path) -> Facts:
    yield (
        _PROBLEM,
        f"{path} is not a shard, embeddings file, model checkpoint, classifier head or sequence file, or is damaged. Give one "
        "of these, or the folder of a run or a model.",
    )


_READERS: Final[dict[str, Callable[[Path], Facts]]] = {
    "run folder": _read_run,
    "frame store": _read_store,
    "shard": _read_shard,
    "embeddings file": _read_embeddings,
    "checkpoint": _read_checkpoint,
    "head": _read_head,
    "sequence file": _read_sequences,
}
