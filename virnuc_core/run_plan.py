"""The plan of a run: written when the run begins, and compared with what is asked for when it is resumed.

A plan holds everything that decides the numbers: what goes in, which models, how they compute, and where
the shards begin and end. It does not hold devices, lanes or folders, so the same plan gives the same shards
wherever they are computed. One thing may be added to it later: a run that is resumed with other emergency switches
computes its missing shards otherwise, see `Continuation`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from virnuc_core.atomic_write import write_text
from virnuc_core.errors import DamagedFileError
from virnuc_core.json_records import parse_object, record_of
from virnuc_core.specs import (
    AttentionBackend,
    EmbeddingsDtype,
    Engine,
    Family,
    InputFile,
    ModelSpec,
    ResolvedCompileMode,
    ResolvedPrecision,
    Rows,
)

SCHEMA_VERSION: Final = 3
Kind = Literal["predict", "embed", "train"]

# Fields that decide no vector and no score: two plans that differ only here have the same fingerprint.
_NOT_DECISIVE: Final = frozenset({"inputs", "name", "location", "switches", "threshold", "warnings"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """One transformer as it will be run.

    Attributes:
        name: as recorded in the outputs.
        family: architecture.
        spec: its dimensions.
        repr_layer: layer whose hidden states are averaged, 0..num_layers.
        weights_fingerprint: SHA-256 over weight files and tokenizer.
        precision: arithmetic of the forward pass.
        engine: "packed", or "reference" (one sequence at a time).
        attention: attention backend; "padded" goes with padded batches.
        compile_mode: how its layers are compiled, or "none".
        token_budget: most tokens in one packed batch.
        location: absolute path that the checkpoint reader finds it by.
    """

    name: str
    family: Family
    spec: ModelSpec
    repr_layer: int
    weights_fingerprint: str
    precision: ResolvedPrecision
    engine: Engine
    attention: AttentionBackend
    compile_mode: ResolvedCompileMode
    token_budget: int
    location: str

    @property
    def arithmetic(self) -> str:
        """How it computes, in words."""
        compiled = f", compiled ({self.compile_mode})" if self.compile_mode != "none" else ""
        return f"{self.precision}, {self.engine} engine, {self.attention} attention{compiled}"

    @property
    def decisive_values(self) -> dict[str, Any]:
        """Field and JSON value of everything that decides its vectors."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_DECISIVE}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedHead:
    """The classifier head: its name, the SHA-256 of its weights, and its absolute path."""

    name: str
    fingerprint: str
    location: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rows begin..end-1 of the frame store: one unit of work, commit and resume.

    Attributes:
        index: place in the plan.
        begin: first row.
        end: one past the last row.
        cost: estimated seconds of work on one device of the kind that the plan was made for.
    """

    index: int
    begin: int
    end: int
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Shards that were missing when the run was resumed with other emergency switches, and how they compute.

    Attributes:
        switches: the environment variables that were set then.
        models: the same models as the plan's, with the arithmetic that the switches left.
        shards: indices, ascending.
    """

    switches: tuple[str, ...]
    models: tuple[PlannedModel, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)  # without slots, so that the fingerprint can be kept
class RunPlan:
    """Everything that decides the numbers of a run.

    Attributes:
        schema_version: layout of plan and shards.
        kind: chunks, frames and calls ("predict"), one vector a sequence ("embed"), or the vectors of frames,
            for a head to be trained on ("train").
        inputs: the files, for people.
        input_digest: digest of what is in the frame store.
        chunk_length: chunk length in bp; None for whole sequences.
        rows: of what there are rows; says nothing for whole sequences.
        models: the DNA model first, then the protein model; one of them for a run with one model.
        head: the classifier; None for no scores.
        dna_head: the classifier for chunks without an open frame; None when they get no score.
        embeddings: dtype of the stored vectors, or "none".
        shards: the units of work, in row order without gaps.
        virnuc_version: version that made the plan.
        warnings: what makes the run slower than it could be, in words.
        switches: the emergency switches of the environment that were set when it was made.
        continued: the shards that compute otherwise than `models` says.
        min_length: records with fewer letters are not used.
        threshold: p_virus from which chunks and contigs are called virus; decides nothing in a shard, so it may change
            when a run goes on.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    inputs: tuple[InputFile, ...]
    input_digest: str
    chunk_length: int | None
    rows: Rows
    models: tuple[PlannedModel, ...]
    head: PlannedHead | None
    dna_head: PlannedHead | None
    embeddings: EmbeddingsDtype
    shards: tuple[Shard, ...]
    virnuc_version: str
    warnings: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    continued: tuple[Continuation, ...] = ()
    min_length: int = 0
    threshold: float = 0.5

    @property
    def num_rows(self) -> int:
        """Rows over all shards."""
        return self.shards[-1].end if self.shards else 0

    @property
    def heads(self) -> tuple[PlannedHead, ...]:
        """The classifiers that it has."""
        return tuple(head for head in (self.head, self.dna_head) if head is not None)

    def model(self, family: Family) -> PlannedModel | None:
        """The model of one family, if the run has it."""
        return next((model for model in self.models if model.family == family), None)

    @cached_property
    def uniform(self) -> "RunPlan":
        """The plan as it was made, in which all shards compute alike."""
        return replace(self, continued=()) if self.continued else self

    def for_shard(self, index: int) -> "RunPlan":
        """The plan in which all shards compute like this one; its fingerprint is that of the shard."""
        return self._continuations.get(index, self.uniform)

    def grouped(self, indices: Iterable[int]) -> "list[tuple[RunPlan, list[Shard]]]":
        """These shards, in the order given, by the plan in which all shards compute like them."""
        groups: dict[str, tuple[RunPlan, list[Shard]]] = {}
        for index in indices:
            plan = self.for_shard(index)
            groups.setdefault(plan.fingerprint, (plan, []))[1].append(self.shards[index])
        return list(groups.values())

    @cached_property
    def _continuations(self) -> Mapping[int, "RunPlan"]:
        found: dict[int, RunPlan] = {}
        for part in self.continued:
            found |= dict.fromkeys(part.shards, replace(self.uniform, models=part.models))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the result; names and places are left out."""
        return hashlib.sha256(json.dumps(self.decisive_values, sort_keys=True).encode()).hexdigest()

    @property
    def decisive_values(self) -> dict[str, Any]:
        """Field path and JSON value of everything that decides the result, in the order to be named in."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "models":
                for model in value:
                    values |= {f"{model.family}.{k}": v for k, v in model.decisive_values.items()}
            elif field.name in ("head", "dna_head"):
                values[field.name] = value and value.fingerprint
            elif field.name == "shards":
                values["shards"] = [(shard.begin, shard.end) for shard in value]
            elif field.name == "continued":
                parts = [([model.decisive_values for model in p.models], p.shards) for p in value]
                values |= {"continued": parts} if parts else {}
            elif field.name == "min_length":
                values |= {"min_length": value} if value else {}
            elif field.name not in _NOT_DECISIVE:
                values[field.name] = value
        return values


def write_plan(path: Path, plan: RunPlan) -> None:
    """Writes a plan with its fingerprint, atomically."""
    write_text(
        path, json.dumps({"fingerprint": plan.fingerprint, **asdict(plan)}, indent=1) + "\n", shared=True
    )


def read_plan(path: Path) -> RunPlan:
    """Reads a plan back.

    Raises:
        DamagedFileError: the file is missing, incomplete, altered, or of another schema.
        OSError: it cannot be read.
    """
    try:
        document = parse_object(path.read_bytes())
        version = document["schema_version"]
        if version != SCHEMA_VERSION:
            raise DamagedFileError(
                f"plan {path} has schema version {version!r}, this virnuc reads {SCHEMA_VERSION}: use the "
                "version that made it, or start over with --force."
            )
        fingerprint = document.pop("fingerprint")
        plan = record_of(RunPlan, document)
        rows = [0, *(shard.end for shard in plan.shards)]
        begins = [(shard.index, shard.begin) for shard in plan.shards]
        if begins != list(enumerate(rows[:-1])) or rows != sorted(rows):
            raise ValueError("its shards do not follow one another")
        altered = fingerprint != plan.fingerprint
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError) as error:
        raise DamagedFileError(
            f"plan {path} cannot be read ({error!r}): start the run over with --force."
        ) from error
    if altered:
        raise DamagedFileError(f"plan {path} was altered since it was written: start over with --force.")
    return plan
