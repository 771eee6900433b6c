"""The plan of a run: its record on disk, and comparing it with what is asked for when the run is resumed.

A plan holds everything that decides the numbers: input, models and how they compute, and the bounds of the shards. It
does not hold devices, lanes or folders, so the same plan gives the same shards wherever they are computed. Only one
thing may be added later: a run that is resumed with other emergency switches computes its missing shards differently,
see `Continuation`.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.files import from_json, parse_object, write_text
from virnuc_core.run_folder import RunFolder
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

# Two plans that differ in these only have the same fingerprint: they decide no vector and no score.
_NOT_IN_FINGERPRINT: Final = frozenset({"inputs", "name", "location", "switches", "threshold", "warnings"})
# Fields that a flag of the same name sets; the last two also exist as --dnabert-FLAG beside a protein model.
_FLAGGED: Final = (
    *("chunk_length", "min_length", "repr_layer", "attention", "compile_mode", "token_budget", "embeddings"),
    *("precision", "engine"),
)
_DNABERT_FLAGGED: Final = ("precision", "engine")
# What "auto" decides by precision and engine.
_RESOLVED: Final = ("attention", "compile_mode", "token_budget")
_NOT_REPROCESSED: Final = frozenset({"kind", "input_digest", "chunk_length", "min_length", "rows"})
# The fields of a model that an emergency switch decides.
_SWITCHED: Final[Mapping[str, frozenset[str]]] = {
    "VIRNUC_DISABLE_FP16": frozenset({"precision", *_RESOLVED}),
    "VIRNUC_DISABLE_PACKING": frozenset({"precision", *_RESOLVED}),
    "VIRNUC_DISABLE_COMPILE": frozenset({"compile_mode"}),
    "VIRNUC_V1_ATTENTION": frozenset({"attention", "compile_mode"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """One transformer as it will be run.

    Attributes:
        name: as recorded in the outputs.
        repr_layer: layer whose hidden states are averaged, 0..num_layers.
        weights_fingerprint: SHA-256 over weight files and tokenizer.
        attention: attention backend; "padded" goes with padded batches.
        token_budget: most tokens in one packed batch.
        location: absolute path of the checkpoint.
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
        """How it computes, for messages."""
        compiled = f", compiled ({self.compile_mode})" if self.compile_mode != "none" else ""
        return f"{self.precision}, {self.engine} engine, {self.attention} attention{compiled}"

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """Field and JSON value of everything that decides its vectors."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_IN_FINGERPRINT}


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
        cost: estimated seconds of work on one device of the kind that the plan was made for.
    """

    index: int
    begin: int
    end: int
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Shards that were missing when the run was resumed with other emergency switches.

    Attributes:
        switches: the environment variables that were set then.
        models: the plan's models, with the arithmetic that the switches left.
        shards: indices, ascending.
    """

    switches: tuple[str, ...]
    models: tuple[PlannedModel, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached properties
class RunPlan:
    """Everything that decides the numbers of a run.

    Attributes:
        schema_version: layout of plan and shards.
        kind: chunks, frames and calls ("predict"), one vector a sequence ("embed"), or the vectors of frames for
            training a head ("train").
        inputs: the files, for people.
        input_digest: digest of the content of the frame store.
        chunk_length: in bp; None for whole sequences.
        rows: which rows the frame store has; without meaning for whole sequences.
        models: the DNA model first, then the protein model; one of them for a run with one model.
        head: the classifier; None for no scores.
        dna_head: the classifier for chunks without an open frame; None when they get no score.
        embeddings: dtype of the stored vectors, or "none".
        shards: in row order without gaps.
        virnuc_version: version that made the plan.
        warnings: what makes the run slower than it could be.
        switches: the emergency switches that were set when it was made.
        continued: the shards that compute differently from what `models` says.
        min_length: shorter records are not used.
        threshold: p_virus from which chunks and contigs are called virus; decides nothing in a shard, so it may change
            when a run is resumed.
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
        return self._continued_plans.get(index, self.uniform)

    def grouped(self, indices: Iterable[int]) -> "list[tuple[RunPlan, list[Shard]]]":
        """These shards, in the order given, by `for_shard`."""
        groups: dict[str, tuple[RunPlan, list[Shard]]] = {}
        for index in indices:
            plan = self.for_shard(index)
            groups.setdefault(plan.fingerprint, (plan, []))[1].append(self.shards[index])
        return list(groups.values())

    @cached_property
    def _continued_plans(self) -> Mapping[int, "RunPlan"]:
        found: dict[int, RunPlan] = {}
        for part in self.continued:
            found |= dict.fromkeys(part.shards, replace(self.uniform, models=part.models))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the result; names and places are left out."""
        return hashlib.sha256(json.dumps(self.fingerprint_fields, sort_keys=True).encode()).hexdigest()

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """Field path and JSON value of everything that decides the result, in the order for messages."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "models":
                for model in value:
                    values |= {f"{model.family}.{k}": v for k, v in model.fingerprint_fields.items()}
            elif field.name in ("head", "dna_head"):
                values[field.name] = value and value.fingerprint
            elif field.name == "shards":
                values["shards"] = [(shard.begin, shard.end) for shard in value]
            elif field.name == "continued":
                parts = [([model.fingerprint_fields for model in p.models], p.shards) for p in value]
                values |= {"continued": parts} if parts else {}
            elif field.name == "min_length":
                values |= {"min_length": value} if value else {}
            elif field.name not in _NOT_IN_FINGERPRINT:
                values[field.name] = value
        return values


def write_plan(path: Path, plan: RunPlan) -> None:
    """Writes a plan with its fingerprint, atomically."""
    document = {"fingerprint": plan.fingerprint, **asdict(plan)}
    write_text(path, json.dumps(document, indent=1) + "\n", shared=True)


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
        plan = from_json(RunPlan, document)
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


def require_same_plan(existing: RunPlan, wanted: RunPlan, folder: RunFolder) -> None:
    """Refuses to resume a run that was made with something else.

    Differences that follow from an emergency switch set for one of the plans only are allowed: see `continue_plan`.

    Raises:
        MismatchError: they would give other numbers; names every such field and both values.
    """
    old, new = existing.fingerprint_fields, wanted.fingerprint_fields
    toggled = {*existing.switches} ^ {*wanted.switches}
    switched = frozenset[str]().union(*(_SWITCHED.get(name, ()) for name in toggled))
    differing = [
        key
        for key in {**old, **new}
        if old.get(key) != new.get(key) and key.partition(".")[2] not in switched
    ]
    if not differing:
        return
    named = _causes(differing) or ["shards"]
    described = "; ".join(_describe(key, existing, wanted, old.get(key), new.get(key)) for key in named)
    raise MismatchError(
        f"{folder.root} holds a run made with something else: {described}. The old settings are in "
        f"{folder.plan}. {_ways_out(existing, differing, folder)}"
    )


def continue_plan(existing: RunPlan, wanted: RunPlan, pending: Collection[int]) -> RunPlan:
    """The plan of a run whose pending shards compute as in `wanted`, and the others as they did."""
    parts = {
        _arithmetic(part.models): replace(part, shards=tuple(i for i in part.shards if i not in pending))
        for part in existing.continued
    }
    key = _arithmetic(wanted.models)
    if key != _arithmetic(existing.models):
        now = Continuation(switches=wanted.switches, models=wanted.models, shards=())
        part = parts.get(key, now)
        parts[key] = replace(part, shards=tuple(sorted({*part.shards, *pending})))
    return replace(
        existing,
        continued=tuple(part for part in parts.values() if part.shards),
        shards=tuple(
            replace(shard, cost=wanted.shards[shard.index].cost) if shard.index in pending else shard
            for shard in existing.shards
        ),
    )


def reused_families(old: RunPlan, new: RunPlan) -> frozenset[Family]:
    """The models whose vectors in the shards of one run are those that another run would compute."""
    common = ("kind", "input_digest", "chunk_length", "rows", "shards", "virnuc_version")
    before, now = old.fingerprint_fields, new.fingerprint_fields
    # Scores are computed from vectors before they are rounded to be stored.
    if old.embeddings != "float32" or any(before[key] != now[key] for key in common):
        return frozenset()
    known = {model.family: model.fingerprint_fields for model in old.models}
    return frozenset(
        model.family for model in new.models if model.fingerprint_fields == known.get(model.family)
    )


def _arithmetic(models: tuple[PlannedModel, ...]) -> str:
    """What decides the vectors of models, as one key."""
    return json.dumps([model.fingerprint_fields for model in models], sort_keys=True)


def _causes(differing: list[str]) -> list[str]:
    """Those of the fields that do not follow from others: naming all of them would bury the cause."""
    other_models = {key.partition(".")[0] for key in differing if key.endswith(".weights_fingerprint")}
    followers = {"shards"}
    for key in differing:
        family, _, name = key.partition(".")
        if name in ("precision", "engine"):
            followers |= {f"{family}.{resolved}" for resolved in _RESOLVED}
    causes = [key for key in differing if key.partition(".")[0] not in other_models and key not in followers]
    return causes + [f"{family}.weights_fingerprint" for family in sorted(other_models)]


def _ways_out(existing: RunPlan, differing: list[str], folder: RunFolder) -> str:
    if folder.previous is not None:
        return "Go on with the old setting, or throw away what was begun with it: --force."
    if existing.kind != "predict":
        return "Go on with the old setting, choose another --out, or start over with --force."
    if _NOT_REPROCESSED & set(differing) or differing == ["shards"]:
        return (
            "Go on with the old setting, choose another --out folder, or start over with --force. "
            "(`virnuc reprocess` moves a run to another model, head or setting, but not to other input, chunks or shards.)"
        )
    return (
        "Go on with the old setting, start over with --force, or move the run to the new setting with "
        f"`virnuc reprocess {folder.root}`, which keeps what both have in common."
    )


def _describe(key: str, existing: RunPlan, wanted: RunPlan, old: Any, new: Any) -> str:
    """One difference: the field, its flag, the value in the folder and the value asked for."""
    family, _, name = key.rpartition(".")
    if key == "input_digest":
        return f"input was {_input_names(existing)} ({old[:12]}), now {_input_names(wanted)} ({new[:12]})"
    if name == "weights_fingerprint":
        models = [plan.model("esm2" if family == "esm2" else "dnabert_s") for plan in (existing, wanted)]
        was, now = (f"{m.name} ({m.weights_fingerprint[:12]})" if m else "none" for m in models)
        return f"{family} model was {was}, now {now}"
    if key in ("head", "dna_head"):
        heads = (getattr(existing, key), getattr(wanted, key))
        was, now = (f"{head.name} ({head.fingerprint[:12]})" if head else "none" for head in heads)
        return f"{key} (--{key.replace('_', '-')}) was {was}, now {now}"
    if key == "rows":
        return f"rows (--dna-head) were of {old}, now of {new}"
    if key == "shards":
        return f"it was cut into {len(existing.shards)} shards (--shard-seconds), now {len(wanted.shards)}"
    if key == "min_length":
        old, new = existing.min_length, wanted.min_length
    is_one_of_two = family == "dnabert_s" and wanted.model("esm2") is not None
    prefix = "dnabert-" if is_one_of_two and name in _DNABERT_FLAGGED else ""
    flag = f" (--{prefix}{name.replace('_', '-')})" if name in _FLAGGED else ""
    return f"{key}{flag} was {old}, now {new}"


def _input_names(plan: RunPlan) -> str:
    names = [file.name for file in plan.inputs]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
