"""Recognises files and folders and checks their integrity: `virnuc inspect` and the more thorough `virnuc fsck`."""

import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import h5py
import numpy as np

from virnuc_core.checked_hdf5 import CHECKSUM_SUFFIX, Hdf5Kind, recognise_hdf5
from virnuc_core.errors import CheckpointError, DamagedFileError, InputError, MismatchError
from virnuc_core.files import iter_temporaries
from virnuc_core.inference.plan import RunPlan, Shard, read_plan
from virnuc_core.inference.shard import read_identity, read_shard, shard_identity
from virnuc_core.models.catalogue import read_purpose
from virnuc_core.models.classifier import classifier_fingerprint
from virnuc_core.models.contig_head import ContigHead
from virnuc_core.models.heads import describe_inputs, load_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.plain_text import visible
from virnuc_core.results.aggregate import file_attributes, shard_columns
from virnuc_core.results.contig_scores import contig_head_of, genome_index_of
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.nearest import RANKS, load_index
from virnuc_core.results.run_json import FileRecord, read_records
from virnuc_core.results.tables import differing_tables
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder
from virnuc_core.sequences.frame_store import FrameStore, StoreMeta, content_digest
from virnuc_core.specs import FRAMES_IN_WORDS, chunks_in_words

Kind = (
    Literal["run folder", "frame store", "checkpoint", "head", "index of genomes", "unknown file"] | Hdf5Kind
)
State = Literal["whole", "damaged", "missing", "foreign", "left over"]
Fact = tuple[str, str]

_BAD: Final[frozenset[State]] = frozenset({"damaged", "missing", "foreign"})
_RUN_AGAIN: Final = "run the same command again"
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_PICKLE_BEGIN: Final = b"\x80"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The state of one file or folder, with the reason and what to do as `message`, "" if it is intact."""

    path: Path
    state: State
    message: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it makes the run incomplete or corrupt; leftovers do not."""
        return self.state in _BAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The kind of a file or folder, its (name, value) facts in display order, and the state of each of its files."""

    kind: Kind
    path: Path
    facts: tuple[Fact, ...]
    findings: tuple[Finding, ...]
    is_thorough: bool

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is incomplete or corrupt."""
        return tuple(found.message for found in self.findings if found.is_bad)

    @property
    def is_complete(self) -> bool:
        """Whether every expected file is present and unchanged since it was written."""
        return not self.problems

    @property
    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        found = {"kind": self.kind, "path": str(self.path), "whole": self.is_complete}
        if not self.is_thorough:
            return {**found, "facts": dict(self.facts), "problems": list(self.problems)}
        findings = [{"path": str(f.path), "state": f.state, "message": f.message} for f in self.findings]
        return {**found, "findings": findings}

    @property
    def summary(self) -> str:
        """As text."""
        lines = [f"{self.path}: {self.kind}, {'whole' if self.is_complete else 'not whole'}"]
        if self.is_thorough:
            num_intact = sum(found.state == "whole" for found in self.findings)
            num_files = len({found.path for found in self.findings})
            lines.append(f"  whole: {num_intact} of {num_files} files and folders")
            lines += [f"  {found.state}: {found.message}" for found in self.findings if found.message]
        else:
            lines += [f"  {name}: {' '.join(value.splitlines())}" for name, value in self.facts]
            lines += [f"  problem: {problem}" for problem in self.problems]
        return visible("\n".join(lines))


def inspect_path(path: Path, *, thorough: bool = False) -> Inspection:
    """Recognises a file or folder by its content and reads all of it.

    If `thorough`, also compares the results of a run with its shards, row by row, and a single shard or embeddings file with the
    plan of its run.

    Raises:
        InputError: there is nothing at `path`.
    """
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(f"there is nothing at {path} that can be read: give an existing file or folder.")
    facts: list[Fact] = []
    folder = RunFolder(path)
    if path.is_dir() and folder.plan.exists():
        kind: Kind = "run folder"
        findings = check_run(folder, thorough=thorough)
        if (folder.plan, "whole") in {(found.path, found.state) for found in findings}:
            plan = read_plan(folder.plan)
            intact = sum(found.state == "whole" and found.path.parent == folder.shards for found in findings)
            facts = [*_plan_facts(plan), ("shards", f"{intact} of {len(plan.shards)} whole")]
    else:
        for kind in _possible_kinds(path):
            facts, finding = _read(path, kind)
            if not finding.is_bad:
                break
        if thorough and not finding.is_bad:
            finding = _judge(path, lambda: _require_own_plan(path, kind))
        findings = [finding]
    return Inspection(
        kind=kind, path=path, facts=tuple(facts), findings=tuple(findings), is_thorough=thorough
    )


def check_run(folder: RunFolder, *, thorough: bool) -> list[Finding]:
    """Checks every file of a run, results against their checksums and, if `thorough`, against the shards, row by row."""
    try:
        plan = read_plan(folder.plan)
    except DamagedFileError as error:
        return [Finding(path=folder.plan, state="damaged", message=str(error))]
    store = _check_store(folder, plan)
    findings = [Finding(path=folder.plan, state="whole"), store]
    intact: list[Shard] = []
    missing: list[str] = []
    for shard in plan.shards:
        found = _check_shard(folder, plan, shard)
        if found is None:
            missing.append(folder.shard(shard.index).name)
            continue
        findings.append(found)
        intact += [] if found.is_bad else [shard]
    if missing:
        message = f"{len(missing)} of {len(plan.shards)} shards are still to be computed ({missing[0]}...): {_RUN_AGAIN}."
        findings.append(Finding(path=folder.shards, state="missing", message=message))
    planned = {folder.shard(shard.index) for shard in plan.shards}
    for path in sorted(folder.shards.glob("shard_*.h5")):
        if path not in planned:
            message = (
                f"{path} is not of this run, which has {len(planned)} shards; nothing reads it: delete it."
            )
            findings.append(Finding(path=path, state="foreign", message=message))
    findings += _check_results(folder, plan)
    if (
        thorough and not store.is_bad and plan.kind != "train"
    ):  # the result of a train run is a head, not vectors
        findings += _check_against_shards(folder, plan, intact)
    return [*findings, *_leftovers(folder)]


def _judge(path: Path, check: Callable[[], object]) -> Finding:
    try:
        check()
    except (DamagedFileError, CheckpointError) as error:
        return Finding(path=path, state="damaged", message=str(error))
    except MismatchError as error:
        return Finding(path=path, state="foreign", message=str(error))
    return Finding(path=path, state="whole")


def _check_store(folder: RunFolder, plan: RunPlan) -> Finding:
    path = folder.frames
    if not path.exists():
        message = _judge(path, lambda: FrameStore.open(path)).message
        return Finding(path=path, state="missing", message=message)

    def check() -> None:
        store = FrameStore.open(path)
        _require_unaltered(store)
        if store.meta.content_sha256 != plan.input_digest:
            raise MismatchError(
                f"{path} holds other sequences than the run was planned for: delete it and run again."
            )

    return _judge(path, check)


def _require_unaltered(store: FrameStore) -> None:
    if content_digest(store.folder) != store.meta.content_sha256:
        raise DamagedFileError(
            f"the columns of {store.folder} were altered after they were written: delete it and run again."
        )


def _check_shard(folder: RunFolder, plan: RunPlan, shard: Shard) -> Finding | None:
    path = folder.shard(shard.index)
    if not path.exists():
        return None
    found = _judge(path, lambda: read_shard(path, shard_identity(plan, shard)))
    if found.state == "damaged":
        advice = f"{found.message} The same command sets it aside and does so."
        return Finding(path=path, state="damaged", message=advice)
    return found


def _check_results(folder: RunFolder, plan: RunPlan) -> Iterator[Finding]:
    """Compares the results with their records in run.json, and an embeddings file with its own checksums."""
    records: dict[str, FileRecord] = {}

    def read() -> None:
        records.update(read_records(folder.report))

    def check(path: Path) -> None:
        if path.suffix == ".h5":
            with Embeddings(path, own=True) as file:
                _require_plan(file, plan)
                file.verify()
        if records and records.get(path.name) != FileRecord.of(path):
            raise DamagedFileError(f"{path} is not as it was when run.json was written: {_RUN_AGAIN}.")

    if folder.report.exists():
        yield _judge(folder.report, read)
    for path in folder.results if plan.kind == "predict" else (folder.embedded, folder.report):
        if not path.exists():
            yield Finding(path=path, state="missing", message=f"{path} is missing: {_RUN_AGAIN}.")
        elif path != folder.report:
            yield _judge(path, partial(check, path))


def _check_against_shards(folder: RunFolder, plan: RunPlan, intact: list[Shard]) -> Iterator[Finding]:
    """Compares all vectors with the shards, row by row, and the tables, byte by byte, with those computed from the shards."""
    store = FrameStore.open(folder.frames)
    path = folder.embeddings if plan.kind == "predict" else folder.embedded
    try:
        with Embeddings(path, own=True) as file:
            _require_plan(file, plan)
            differences = [
                text for shard in intact for text in _differences(folder, plan, store, file, shard)
            ]
    except (DamagedFileError, MismatchError):
        return  # already reported
    for text in differences:
        yield Finding(path=path, state="damaged", message=f"{text}: {_RUN_AGAIN}.")
    if plan.kind != "predict" or differences or len(intact) < len(plan.shards):
        return
    try:
        head, genomes = contig_head_of(plan), genome_index_of(plan)
    except (CheckpointError, MismatchError) as error:
        message = f"the tables cannot be compared with the shards: {error}"
        yield Finding(path=Path(plan.head.location if plan.head else ""), state="missing", message=message)
        return
    for path in sorted(differing_tables(folder, store, plan.threshold, head, plan.fdr, genomes)):
        message = f"{path} is not what the shards give: {_RUN_AGAIN}."
        yield Finding(path=path, state="damaged", message=message)


def _differences(
    folder: RunFolder, plan: RunPlan, store: FrameStore, file: Embeddings, shard: Shard
) -> Iterator[str]:
    path = folder.shard(shard.index)
    result = read_shard(path, shard_identity(plan, shard))
    for name, expected in shard_columns(plan, store, shard, result).items():
        if name not in file:
            yield f"{file.path} has no {name!r}"
            continue
        found = file.rows(name, shard.begin, shard.end)
        if found.shape != expected.shape:
            yield f"{file.path}: {name!r} has another form than in {path.name}"
            continue
        differing = np.flatnonzero((found != expected).reshape(len(expected), -1).any(axis=1))
        if len(differing):
            row = shard.begin + int(differing[0])
            [frame] = store.frame_ids(row, row + 1)
            yield (
                f"{file.path}: {len(differing)} rows of {name!r} are not as in {path.name}, the first is "
                f"row {row} ({frame})"
            )


def _require_plan(file: Embeddings, plan: RunPlan) -> None:
    """Compares all metadata of an embeddings file with a plan."""
    wanted = file_attributes(plan)
    said = {name: value for name, value in file.attrs.items() if not name.endswith(CHECKSUM_SUFFIX)}
    differing = [name for name in {**wanted, **said} if wanted.get(name) != said.get(name)]
    if differing:
        named = [name for name in differing if name != "plan_fingerprint"] or differing
        described = "; ".join(
            f"{n} is {said.get(n)} in the file and {wanted.get(n)} in the plan" for n in named
        )
        raise MismatchError(
            f"embeddings file {file.path} is of another run: {described}. Run the command that made the plan "
            "again: it writes the file from the shards."
        )


def _require_own_plan(path: Path, kind: Kind) -> None:
    """Compares an intact shard or embeddings file with the plan of its run, if it lies in one."""
    if kind == "shard":
        folder = RunFolder(path.parents[1])
        index = read_identity(path)["index"]
        plan = read_plan(folder.plan) if folder.plan.is_file() else None
        if plan is not None and path == folder.shard(index) and index < len(plan.shards):
            read_shard(path, shard_identity(plan, plan.shards[index]))
    elif kind == "embeddings file":
        beside = path.with_name(path.name + EMBED_SUFFIX)
        folder = RunFolder(beside if beside.is_dir() else path.parent)
        if folder.plan.is_file():
            with Embeddings(path, own=True) as file:
                _require_plan(file, read_plan(folder.plan))


def _leftovers(folder: RunFolder) -> Iterator[Finding]:
    own = {folder.frames.name, folder.plan.name, *(path.name for path in folder.results)}
    killed = [path for path, name in iter_temporaries(folder.root) if name in own]
    killed += [path for path, _ in iter_temporaries(folder.shards)]
    for path in killed:
        message = f"{path} was left by a killed run, or a run is at work: the next run removes it."
        yield Finding(path=path, state="left over", message=message)
    for path in sorted(folder.shards.glob("shard_*.h5.damaged-*")):
        message = f"{path} was set aside, and is not read: delete it when nobody wants to look into it."
        yield Finding(path=path, state="left over", message=message)


def _possible_kinds(path: Path) -> tuple[Kind, ...]:
    """Candidates for the kind of a file or folder; if it can be read as none of them, it is reported as the last."""
    if path.is_dir():
        return ("frame store",) if StoreMeta.is_in(path) else ("checkpoint",)
    if h5py.is_hdf5(path):
        return (recognise_hdf5(path),)
    is_of_weights = path.suffix in _WEIGHT_SUFFIXES
    if not is_of_weights and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_of_weights = any(name.endswith("data.pkl") for name in archive.namelist())
    elif not is_of_weights:
        with path.open("rb") as file:
            is_of_weights = file.read(1) == _PICKLE_BEGIN
    return ("head", "index of genomes", "checkpoint") if is_of_weights else ("unknown file",)


def _read(path: Path, kind: Kind) -> tuple[list[Fact], Finding]:
    """Reads all of a file or folder, and returns its facts up to where it is corrupt."""
    facts: list[Fact] = []

    def read() -> None:
        for fact in _READERS[kind](path):
            facts.append(fact)  # one by one, to keep those before an error

    return facts, _judge(path, read)


def _plan_facts(plan: RunPlan) -> Iterator[Fact]:
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


def _read_store(path: Path) -> Iterator[Fact]:
    store = FrameStore.open(path)
    meta = store.meta
    yield "inputs", ", ".join(file.name for file in meta.inputs)
    yield "records", f"{meta.num_records} used, {meta.num_rejected} rejected"
    yield "chunks", str(meta.num_chunks)
    yield "frames", str(meta.num_frames)
    yield "chunk length", chunks_in_words(meta.chunk_length)
    if meta.chunk_length:
        yield "rule", FRAMES_IN_WORDS[meta.frames]
    _require_unaltered(store)


def _read_shard(path: Path) -> Iterator[Fact]:
    identity = read_identity(path)
    yield "plan fingerprint", identity["plan_fingerprint"]
    yield "shard", str(identity["index"])
    yield "rows", f"{identity['begin']} to {identity['end'] - 1}"
    yield "models", ", ".join(f"{model['name']} ({model['precision']})" for model in identity["models"])
    yield "virnuc version", identity["virnuc_version"]
    read_shard(path, identity)


def _read_embeddings(path: Path) -> Iterator[Fact]:
    with Embeddings(path, own=True) as file:
        for name, value in file.attrs.items():
            yield name, str(value)
        yield "datasets", ", ".join(file.names)
        yield "rows", str(len(file))
        file.verify()


def _read_checkpoint(path: Path) -> Iterator[Fact]:
    checkpoint = open_checkpoint(str(path), None)
    yield "family", checkpoint.family
    yield "weights fingerprint", checkpoint.fingerprint
    spec = checkpoint.spec
    yield "layers", str(spec.num_layers)
    yield "width", str(spec.embedding_dim)
    yield "heads", str(spec.num_heads)
    yield "vocabulary", str(spec.vocab_size)
    checkpoint.state_dict()


def _read_head(path: Path) -> Iterator[Fact]:
    head = load_head(path)
    yield "features", str(head.in_features)
    yield "frames", FRAMES_IN_WORDS[read_purpose(path).frames]
    if isinstance(head, ContigHead):
        yield "takes", describe_inputs(head)
        yield "classes", ", ".join(head.spec.classes)
    yield "fingerprint", classifier_fingerprint(path)


def _read_index(path: Path) -> Iterator[Fact]:
    index = load_index(path)
    yield "pieces", f"{len(index)} of {len(index.names.values)} genomes"
    yield "head", index.head
    cuts = zip(RANKS, index.cuts, strict=True)
    yield (
        "least similarity",
        ", ".join(f"{rank} {'none' if cut is None else f'{cut:.3f}'}" for rank, cut in cuts),
    )
    yield "unsure above a novelty of", "none" if index.unsure_above is None else f"{index.unsure_above:.3f}"


def _refuse_hdf5(path: Path) -> Iterator[Fact]:
    raise DamagedFileError(
        f"{path} holds nothing that virnuc can read: give a file that virnuc wrote, or make it again."
    )


def _refuse(path: Path) -> Iterator[Fact]:
    raise DamagedFileError(
        f"{path} is no shard, embeddings file, model checkpoint or classifier head. Give one of these, or the "
        "whole folder of a run or of a model."
    )


_READERS: Final[dict[Kind, Callable[[Path], Iterator[Fact]]]] = {
    "frame store": _read_store,
    "shard": _read_shard,
    "embeddings file": _read_embeddings,
    "checkpoint": _read_checkpoint,
    "head": _read_head,
    "index of genomes": _read_index,
    "unknown file": _refuse,
    "HDF5 file that virnuc did not write": _refuse_hdf5,
    "damaged HDF5 file": _refuse_hdf5,
}
