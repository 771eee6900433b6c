"""Says what a file or folder is, and whether it is intact: `virnuc inspect`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import h5py

from virnuc_core.checked_hdf5 import CHECKSUM_SUFFIX, recognise_hdf5
from virnuc_core.errors import CheckpointError, DamagedFileError, InputError, MismatchError
from virnuc_core.files import file_digest
from virnuc_core.inference.plan import RunPlan, read_plan
from virnuc_core.inference.shard import missing_shards, read_identity, read_shard, shard_identity
from virnuc_core.models.heads import load_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.plain_text import visible
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.run_json import FileRecord, read_records
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore, StoreMeta, content_digest
from virnuc_core.sequences.reader import iter_records, reading_text, rejection_reason
from virnuc_core.specs import FRAMES_IN_WORDS, chunks_in_words

Facts = Iterator[tuple[str, str]]

_RUN_AGAIN: Final = "run the same command again"
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PICKLES_BEGIN: Final = (b"\x80", b"PK")  # a pickle, or a zip file of some
_SNIFFED_BYTES: Final = 64


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
        raise InputError(f"there is nothing at {path} that can be read: give an existing file or folder.")
    if path.is_dir() and RunFolder(path).plan.exists():
        return _inspect_run(RunFolder(path))
    for kind in _possible_kinds(path):
        facts: dict[str, str] = {}
        problem = _problem(partial(_read_facts, path, kind, facts))
        if problem is None:
            break
    return Inspection(kind=kind, path=path, facts=facts, problems=(problem,) if problem else ())


def _read_facts(path: Path, kind: str, facts: dict[str, str]) -> None:
    """Adds facts one by one, so that those before an error stay."""
    for name, value in _READERS[kind](path):
        facts[name] = value


def _problem(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (DamagedFileError, CheckpointError, MismatchError, InputError) as error:
        return str(error)
    return None


def _inspect_run(folder: RunFolder) -> Inspection:
    """Reads every shard with its checksums, and compares the results with the SHA-256 in run.json."""
    facts: dict[str, str] = {}
    problems: list[str] = []
    try:
        plan = read_plan(folder.plan)
    except DamagedFileError as error:
        problems.append(str(error))
    else:
        facts.update(_plan_facts(plan))
        problems += filter(None, [_problem(lambda: _require_store(folder, plan))])
        missing = missing_shards(folder, [shard.index for shard in plan.shards])
        present = [shard for shard in plan.shards if shard.index not in set(missing)]
        found = [
            _problem(partial(read_shard, folder.shard(shard.index), shard_identity(plan, shard)))
            for shard in present
        ]
        problems += filter(None, found)
        facts["shards"] = f"{found.count(None)} of {len(plan.shards)} intact"
        if missing:
            problems.append(
                f"{len(missing)} of {len(plan.shards)} shards are still to be computed: {_RUN_AGAIN}."
            )
        problems += _changed_results(folder, plan)
    return Inspection(kind="run folder", path=folder.root, facts=facts, problems=tuple(problems))


def _require_store(folder: RunFolder, plan: RunPlan) -> None:
    store = FrameStore.open(folder.frames)
    _require_unaltered(store)
    if store.meta.content_sha256 != plan.input_digest:
        raise MismatchError(
            f"{folder.frames} holds other sequences than the run was planned for: delete it and run again."
        )


def _require_unaltered(store: FrameStore) -> None:
    if content_digest(store.folder) != store.meta.content_sha256:
        raise DamagedFileError(
            f"the columns of {store.folder} were altered after they were written: delete it and run again."
        )


def _changed_results(folder: RunFolder, plan: RunPlan) -> Iterator[str]:
    if not folder.report.exists():
        yield f"{folder.report} is missing, so the run is not finished: {_RUN_AGAIN}."
        return
    try:
        records = read_records(folder.report)
    except DamagedFileError as error:
        yield str(error)
        return
    for name, record in records.items():
        path = folder.root / name if plan.kind == "predict" else folder.embedded
        if not path.exists():
            yield f"{path} is missing: {_RUN_AGAIN}."
        elif FileRecord.of(path) != record:
            yield f"{path} is not as it was when run.json was written: {_RUN_AGAIN}."


def _possible_kinds(path: Path) -> tuple[str, ...]:
    """Candidates for the kind of a file or folder; one that can be read as none of them is reported as the last."""
    if path.is_dir():
        return ("frame store",) if StoreMeta.is_in(path) else ("checkpoint",)
    if h5py.is_hdf5(path):
        return (recognise_hdf5(path),)
    with path.open("rb") as file:
        is_pickled = file.read(2).startswith(_PICKLES_BEGIN)
    if is_pickled or path.suffix in _WEIGHT_SUFFIXES:
        return "head", "checkpoint"
    return ("sequence file",) if _has_sequences(path) else ("unknown file",)


def _has_sequences(path: Path) -> bool:
    """Whether a file begins as FASTA or FASTQ do, or is compressed and damaged."""
    try:
        with reading_text(str(path)) as text:
            return text.peek(_SNIFFED_BYTES)[:_SNIFFED_BYTES].lstrip()[:1] in (b">", b"@")
    except InputError:
        return True


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
    checkpoint.state_dict()


def _read_head(path: Path) -> Facts:
    head = load_head(path)
    yield "features", str(head.in_features)
    yield "frames", FRAMES_IN_WORDS[head.frames]
    yield "takes", head.inputs_in_words
    if head.classes:
        yield "classes", ", ".join(head.classes)
    yield "fingerprint", file_digest(path)


def _read_sequences(path: Path) -> Facts:
    records = bases = usable = 0
    for record in iter_records([path], "dna"):
        records, bases = records + 1, bases + len(record.sequence)
        usable += rejection_reason(record.sequence, "dna") is None
    yield "records", f"{records}, {usable} of them DNA"
    yield "letters", str(bases)


def _refuse(path: Path) -> Facts:
    raise DamagedFileError(
        f"{path} is no shard, embeddings file, model checkpoint, classifier head or sequence file, or it is damaged. Give one of "
        "these, or the whole folder of a run or of a model."
    )


_READERS: Final[dict[str, Callable[[Path], Facts]]] = {
    "frame store": _read_store,
    "shard": _read_shard,
    "embeddings file": _read_embeddings,
    "checkpoint": _read_checkpoint,
    "head": _read_head,
    "sequence file": _read_sequences,
    "unknown file": _refuse,
    "HDF5 file that virnuc did not write": _refuse,
    "damaged HDF5 file": _refuse,
}
