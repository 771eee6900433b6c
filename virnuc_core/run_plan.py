"""The plan of a run: written once, never changed, and compared with what is asked for when a run goes on.

A plan holds everything that decides the numbers: what goes in, which models, how they compute, and where
the shards begin and end. It does not hold devices, lanes or folders, so the same plan gives the same shards
wherever they are computed.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from virnuc_core.atomic_write import write_text
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.specs import (
    AttentionBackend,
    EmbeddingsDtype,
    Engine,
    Family,
    InputFile,
    ModelSpec,
    ResolvedCompileMode,
    ResolvedPrecision,
)

SCHEMA_VERSION: Final = 2
Kind = Literal["predict", "embed"]

# What a plan says about where things were found; two plans that differ only here are the same plan.
_PLACES: Final = frozenset({"inputs", "name", "location"})
# Fields that a flag of the same name sets, and those that one sets for the DNA model beside a protein model.
_FLAGGED: Final = (
    *("chunk_length", "repr_layer", "precision", "engine", "attention"),
    *("compile_mode", "token_budget", "embeddings"),
)
_DNABERT_FLAGGED: Final = ("precision", "engine")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The names inside a run's folder; nothing else in the product spells them."""

    root: Path

    @property
    def plan(self) -> Path:
        """The plan, `plan.json`."""
        return self.root / "plan.json"

    @property
    def frames(self) -> Path:
        """The frame store."""
        return self.root / "frames"

    @property
    def shards(self) -> Path:
        """The folder of finished shards."""
        return self.root / "shards"

    def shard(self, index: int) -> Path:
        """The file of one shard."""
        return self.shards / f"shard_{index:05d}.h5"

    @property
    def embeddings(self) -> Path:
        """Vectors and scores of every frame, in input order."""
        return self.root / "embeddings.h5"

    @property
    def predictions(self) -> Path:
        """One row a chunk."""
        return self.root / "predictions.tsv"

    @property
    def contigs(self) -> Path:
        """One row a contig."""
        return self.root / "contigs.tsv"

    @property
    def prediction_results(self) -> Path:
        """One row a frame, in VirNucPro's format."""
        return self.root / "prediction_results.txt"

    @property
    def highest_score(self) -> Path:
        """One row a scored chunk, in VirNucPro's format."""
        return self.root / "prediction_results_highestscore.csv"

    @property
    def rejected(self) -> Path:
        """The records that could not be used."""
        return self.root / "rejected.tsv"

    @property
    def report(self) -> Path:
        """What was run, how fast, and with what, `run.json`."""
        return self.root / "run.json"


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


@dataclass(frozen=True, kw_only=True)  # without slots, so that the fingerprint can be kept
class RunPlan:
    """Everything that decides the numbers of a run.

    Attributes:
        schema_version: layout of plan and shards.
        kind: chunks, frames and calls ("predict"), or one vector a sequence ("embed").
        inputs: the files, for people.
        input_digest: digest of what is in the frame store.
        chunk_length: chunk length in bp; None for whole sequences.
        models: the DNA model first, then the protein model; one of them for a run with one model.
        head: the classifier; None for no scores.
        embeddings: dtype of the stored vectors, or "none".
        shards: the units of work, in row order without gaps.
        virnuc_version: version that made the plan.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    inputs: tuple[InputFile, ...]
    input_digest: str
    chunk_length: int | None
    models: tuple[PlannedModel, ...]
    head: PlannedHead | None
    embeddings: EmbeddingsDtype
    shards: tuple[Shard, ...]
    virnuc_version: str

    @property
    def num_rows(self) -> int:
        """Rows over all shards."""
        return self.shards[-1].end if self.shards else 0

    def model(self, family: Family) -> PlannedModel | None:
        """The model of one family, if the run has it."""
        return next((model for model in self.models if model.family == family), None)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the result; names and places are left out."""
        decisive = dict(_decisive_values(self))
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def write_plan(path: Path, plan: RunPlan) -> None:
    """Writes a plan with its fingerprint, atomically."""
    document = {"fingerprint": plan.fingerprint, **asdict(plan)}
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_plan(path: Path) -> RunPlan:
    """Reads a plan back.

    Raises:
        DamagedFileError: the file is missing, incomplete, altered, or of another schema.
    """
    try:
        document = json.loads(path.read_bytes())
        version = document["schema_version"]
        if version != SCHEMA_VERSION:
            raise DamagedFileError(
                f"plan {path} has schema version {version!r}, this virnuc reads {SCHEMA_VERSION}: use the "
                "version that made it, or start over with --force."
            )
        fingerprint = document.pop("fingerprint")
        plan = _plan_from_json(document)
        altered = fingerprint != plan.fingerprint
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            f"plan {path} cannot be read ({error!r}): start the run over with --force."
        ) from error
    if altered:
        raise DamagedFileError(
            f"plan {path} was altered after it was written: start the run over with --force."
        )
    return plan


def require_same_plan(existing: RunPlan, wanted: RunPlan, folder: Path) -> None:
    """Refuses to go on with a run in a folder that was made with something else.

    Args:
        existing: the plan in the folder.
        wanted: the plan of what is asked for now.
        folder: the run's folder, for the message.

    Raises:
        MismatchError: they would give other numbers; names every such field and both values.
    """
    old, new = dict(_decisive_values(existing)), dict(_decisive_values(wanted))
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not differing:
        return
    # What follows from another model or input is left out: it would bury the cause.
    other_models = {key.partition(".")[0] for key in differing if key.endswith(".weights_fingerprint")}
    causes = [key for key in differing if key.partition(".")[0] not in other_models and key != "shards"]
    causes += [f"{family}.weights_fingerprint" for family in sorted(other_models)]
    named = causes or ["shards"]
    described = "; ".join(_describe(key, existing, wanted, old.get(key), new.get(key)) for key in named)
    raise MismatchError(
        f"{folder} holds a run made with something else: {described}. "
        "Go on with the old setting, choose another --out folder, or start over with --force."
    )


def _decisive_values(plan: RunPlan) -> list[tuple[str, Any]]:
    """Field path and JSON value of everything that decides the result, in the order to be named in."""
    values: list[tuple[str, Any]] = []
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name == "models":
            for model in value:
                values += [(f"{model.family}.{k}", v) for k, v in asdict(model).items() if k not in _PLACES]
        elif field.name == "head":
            values.append(("head", value and value.fingerprint))
        elif field.name == "shards":
            values.append(("shards", [(shard.begin, shard.end) for shard in value]))
        elif field.name not in _PLACES:
            values.append((field.name, value))
    return values


def _describe(key: str, existing: RunPlan, wanted: RunPlan, old: Any, new: Any) -> str:
    """One difference in words: the field, its flag, the value in the folder and the value asked for."""
    family, _, name = key.rpartition(".")
    if key == "input_digest":
        return f"input was {_input_names(existing)} ({old[:12]}), now {_input_names(wanted)} ({new[:12]})"
    if name == "weights_fingerprint":
        models = [plan.model("esm2" if family == "esm2" else "dnabert_s") for plan in (existing, wanted)]
        was, now = (f"{m.name} ({m.weights_fingerprint[:12]})" if m else "none" for m in models)
        return f"{family} model was {was}, now {now}"
    if key == "head":
        was, now = (
            f"{p.head.name} ({p.head.fingerprint[:12]})" if p.head else "none" for p in (existing, wanted)
        )
        return f"head (--head) was {was}, now {now}"
    if key == "shards":
        return (
            f"the run was cut into {len(existing.shards)} shards (--shard-seconds), now {len(wanted.shards)}"
        )
    is_one_of_two = family == "dnabert_s" and wanted.model("esm2") is not None
    prefix = "dnabert-" if is_one_of_two and name in _DNABERT_FLAGGED else ""
    flag = f" (--{prefix}{name.replace('_', '-')})" if name in _FLAGGED else ""
    return f"{key}{flag} was {old}, now {new}"


def _input_names(plan: RunPlan) -> str:
    names = [file.name for file in plan.inputs]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _plan_from_json(document: dict[str, Any]) -> RunPlan:
    models = [PlannedModel(**{**model, "spec": ModelSpec(**model["spec"])}) for model in document["models"]]
    head = document["head"]
    return RunPlan(
        **{
            **document,
            "inputs": tuple(InputFile(**file) for file in document["inputs"]),
            "models": tuple(models),
            "head": PlannedHead(**head) if head is not None else None,
            "shards": tuple(Shard(**shard) for shard in document["shards"]),
        }
    )
