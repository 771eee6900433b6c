"""The plan of a run: its file, and the comparison with the requested settings on resume.

A plan holds everything that determines the results, but no devices, lanes or folders: it gives the same shards wherever
they are computed. After its creation, only `Continuation`s and the rule of calls (threshold, FDR) change.
"""

import hashlib
import json
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from virnuc_core import __version__
from virnuc_core.errors import DamagedFileError, HostError, MismatchError
from virnuc_core.files import from_json, parse_object, write_text
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import (
    FRAMES_IN_WORDS,
    AttentionBackend,
    ChunkRule,
    EmbeddingsDtype,
    Engine,
    Family,
    FrameRule,
    InputFile,
    ModelSpec,
    ResolvedPrecision,
)
from virnuc_core.versions import series

SCHEMA_VERSION: Final = 5
Kind = Literal["predict", "embed", "train"]

# These affect no vector and no score.
_NOT_IN_FINGERPRINT: Final = frozenset(
    {"inputs", "name", "location", "switches", "threshold", "fdr", "warnings"}
)
# Fields set by a flag of the same name; the last two also by --dnabert-FLAG in runs with both models.
_FLAGGED: Final = (
    *("chunk_length", "min_length", "repr_layer", "attention", "token_budget", "embeddings"),
    *("precision", "engine"),
)
_DNABERT_FLAGGED: Final = ("precision", "engine")
# "auto" resolves these from precision and engine.
_RESOLVED: Final = ("attention", "token_budget")
_NOT_REPROCESSED: Final = frozenset({"kind", "input_digest", "chunk_length", "min_length", "frames"})
# Fields of a model that an emergency switch affects.
_SWITCHED: Final[Mapping[str, frozenset[str]]] = {
    "VIRNUC_DISABLE_FP16": frozenset({"precision", *_RESOLVED}),
    "VIRNUC_DISABLE_PACKING": frozenset({"precision", *_RESOLVED}),
    "VIRNUC_DISABLE_COMPILE": frozenset({"compiled"}),
    "VIRNUC_V1_ATTENTION": frozenset({"attention"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """A transformer with resolved settings.

    Attributes:
        repr_layer: layer whose hidden states are averaged, 0..num_layers.
        weights_fingerprint: SHA-256 over weight files and tokenizer.
        token_budget: maximum tokens in a packed batch.
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
    compiled: bool
    token_budget: int
    location: str

    @property
    def arithmetic(self) -> str:
        """Precision, engine, attention and whether layers are compiled, for messages."""
        compiled = ", compiled" if self.compiled else ""
        return f"{self.precision}, {self.engine} engine, {self.attention} attention{compiled}"

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """Field and JSON value of everything that determines its vectors."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_IN_FINGERPRINT}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedHead:
    """A classifier head; `fingerprint` is the SHA-256 of its weights, `location` an absolute path.

    `index` is the SHA-256 of the index of its training genomes, None without one.
    """

    name: str
    fingerprint: str
    location: str
    index: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rows begin..end-1 of the frame store, the unit of work, commit and resume; `cost` is in estimated seconds."""

    index: int
    begin: int
    end: int
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Shards (ascending) computed by `models`, with the arithmetic of other emergency switches that were set on resume."""

    switches: tuple[str, ...]
    models: tuple[PlannedModel, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached properties
class RunPlan:
    """Everything that determines the results of a run.

    Attributes:
        kind: "predict" (chunks, frames and calls), "embed" (one vector per sequence), or "train" (vectors of frames).
        inputs: files, for information only.
        input_digest: digest of the frame store's content.
        chunk_length: in bp, or a table by record length; None for whole sequences, for which `frames` has no meaning.
        models: DNA model first, then protein model; at least one.
        head: None if nothing is scored.
        shards: contiguous, in row order.
        warnings: reasons why the run is slower than possible.
        switches: emergency switches set when the plan was made.
        continued: shards whose arithmetic differs from `models`.
        virnuc_version: of the planner; other releases of its series give the same results.
        threshold: minimum p_virus of a call; affects no shard, so it may change on resume.
        fdr: most that the expected false discovery rate of calls of contigs may be, instead of the threshold; None for the
            threshold. May change as well.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    inputs: tuple[InputFile, ...]
    input_digest: str
    chunk_length: ChunkRule | None
    frames: FrameRule
    models: tuple[PlannedModel, ...]
    head: PlannedHead | None
    embeddings: EmbeddingsDtype
    shards: tuple[Shard, ...]
    virnuc_version: str
    warnings: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    continued: tuple[Continuation, ...] = ()
    min_length: int = 0
    threshold: float = 0.5
    fdr: float | None = None

    @property
    def num_rows(self) -> int:
        """Rows over all shards."""
        return self.shards[-1].end if self.shards else 0

    def model(self, family: Family) -> PlannedModel | None:
        """The model of a family; None if the run has none."""
        return next((model for model in self.models if model.family == family), None)

    def require_own_series(self) -> None:
        """Raises HostError if this installation is of another release series, whose results may differ."""
        if series(self.virnuc_version) != series(__version__):
            raise HostError(
                f"this run was planned by virnuc {self.virnuc_version}, and {socket.gethostname()} has {__version__}, "
                "whose results may differ: install the same version on every host."
            )

    @cached_property
    def uniform(self) -> "RunPlan":
        """The original plan, without continuations."""
        return replace(self, continued=()) if self.continued else self

    def for_shard(self, index: int) -> "RunPlan":
        """The plan with this shard's arithmetic for all shards; its fingerprint is stored in the shard."""
        return self._continued_plans.get(index, self.uniform)

    def grouped(self, indices: Iterable[int]) -> "list[tuple[RunPlan, list[Shard]]]":
        """Groups these shards, in the given order, by `for_shard`."""
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
        """SHA-256 over `fingerprint_fields`."""
        return hashlib.sha256(json.dumps(self.fingerprint_fields, sort_keys=True).encode()).hexdigest()

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """Field path and JSON value of everything that determines the results, in message order."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "models":
                for model in value:
                    values |= {f"{model.family}.{k}": v for k, v in model.fingerprint_fields.items()}
            elif field.name == "head":
                values[field.name] = value and value.fingerprint
                values |= {"head.index": value.index} if value and value.index else {}
            elif field.name == "shards":
                values["shards"] = [(shard.begin, shard.end) for shard in value]
            elif field.name == "continued":
                parts = [([model.fingerprint_fields for model in p.models], p.shards) for p in value]
                values |= {"continued": parts} if parts else {}
            elif field.name == "min_length":
                values |= {"min_length": value} if value else {}
            elif field.name == "virnuc_version":
                values[field.name] = series(value)
            elif field.name not in _NOT_IN_FINGERPRINT:
                values[field.name] = value
        return values


def write_plan(path: Path, plan: RunPlan) -> None:
    """Writes a plan with its fingerprint, atomically."""
    document = {"fingerprint": plan.fingerprint, **asdict(plan)}
    write_text(path, json.dumps(document, indent=1) + "\n", shared=True)


def read_plan(path: Path) -> RunPlan:
    """Reads a plan.

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
    """Rejects resuming a run with other settings, except for effects of emergency switches (see `continue_plan`).

    Raises:
        MismatchError: the results would differ; names each such field with both values.
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
    """The plan with pending shards computed as in `wanted`, and the others as they were."""
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
    """Models whose vectors in the old shards are those that the new run would compute."""
    common = ("kind", "input_digest", "chunk_length", "frames", "shards", "virnuc_version")
    before, now = old.fingerprint_fields, new.fingerprint_fields
    # Scores are computed from unrounded vectors.
    if old.embeddings != "float32" or any(before[key] != now[key] for key in common):
        return frozenset()
    known = {model.family: model.fingerprint_fields for model in old.models}
    return frozenset(
        model.family for model in new.models if model.fingerprint_fields == known.get(model.family)
    )


def _arithmetic(models: tuple[PlannedModel, ...]) -> str:
    return json.dumps([model.fingerprint_fields for model in models], sort_keys=True)


def _causes(differing: list[str]) -> list[str]:
    """The fields that do not follow from others, so that messages name the cause only."""
    other_models = {key.partition(".")[0] for key in differing if key.endswith(".weights_fingerprint")}
    followers = {"shards", *(["head.index"] if "head" in differing else [])}
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
            "(`virnuc reprocess` moves a run to another model, head or setting, but not to other input, chunks, frames or shards.)"
        )
    return (
        "Go on with the old setting, start over with --force, or move the run to the new setting with "
        f"`virnuc reprocess {folder.root}`, which keeps what both have in common."
    )


def _describe(key: str, existing: RunPlan, wanted: RunPlan, old: Any, new: Any) -> str:
    family, _, name = key.rpartition(".")
    if key == "input_digest":
        return f"input was {_input_names(existing)} ({old[:12]}), now {_input_names(wanted)} ({new[:12]})"
    if name == "weights_fingerprint":
        models = [plan.model("esm2" if family == "esm2" else "dnabert_s") for plan in (existing, wanted)]
        was, now = (f"{m.name} ({m.weights_fingerprint[:12]})" if m else "none" for m in models)
        return f"{family} model was {was}, now {now}"
    if key == "head":
        heads = (existing.head, wanted.head)
        was, now = (f"{head.name} ({head.fingerprint[:12]})" if head else "none" for head in heads)
        return f"head (--head) was {was}, now {now}"
    if key == "head.index":
        was, now = (digest[:12] if digest else "none" for digest in (old, new))
        return f"the index of genomes beside head {existing.head.name if existing.head else ''} was {was}, now {now}"
    if key == "frames":
        was, now = (FRAMES_IN_WORDS[plan.frames] for plan in (existing, wanted))
        return f"frames (--{'frames' if existing.kind == 'train' else 'head'}) were {was}, now {now}"
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
