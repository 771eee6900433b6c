"""The plan of a run: its file, and the comparison with the requested settings on resume.

A plan holds everything that determines the results, but no devices, lanes or folders: it gives the same shards wherever
they are computed. After its creation, only the rule of calls changes.
"""

import hashlib
import json
import socket
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from virnuc_core import __version__
from virnuc_core.errors import DamagedFileError, HostError, MismatchError
from virnuc_core.files import from_json, parse_object, write_text
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import (
    AttentionBackend,
    CallRule,
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

SCHEMA_VERSION: Final = 7
Kind = Literal["predict", "embed", "train"]

# These affect no vector and no score.
_NOT_IN_FINGERPRINT: Final = frozenset({"inputs", "name", "location", "switches", "calls", "warnings"})


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedHead:
    """A classifier head; `fingerprint` is the SHA-256 of its file, `location` an absolute path."""

    name: str
    fingerprint: str
    location: str
    calibrated: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rows begin..end-1 of the frame store, the unit of work, commit and resume; `cost` is in estimated seconds."""

    index: int
    begin: int
    end: int
    cost: float


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
        switches: emergency switches set when the plan was made, for information only: the models have what follows from them.
        virnuc_version: of the planner; other releases of its series give the same results.
        calls: how contigs are called; affects no shard, so it may change on resume.
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
    min_length: int = 0
    calls: CallRule = field(default_factory=CallRule)

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
                f"this run was planned by virnuc {self.virnuc_version}, but {socket.gethostname()} has {__version__}, whose "
                "results may differ: install the same version on all hosts."
            )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over `fingerprint_fields`."""
        return hashlib.sha256(json.dumps(self.fingerprint_fields, sort_keys=True).encode()).hexdigest()

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """Field path and JSON value of everything that determines the results, in message order."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in (*_NOT_IN_FINGERPRINT, "models", "min_length")
        }
        for model in self.models:
            own = asdict(model).items()
            values |= {
                f"{model.family}.{name}": value for name, value in own if name not in _NOT_IN_FINGERPRINT
            }
        if self.min_length:
            values["min_length"] = self.min_length
        return values | {
            "head": self.head and self.head.fingerprint,
            "shards": [(shard.begin, shard.end) for shard in self.shards],
            "virnuc_version": series(self.virnuc_version),
        }


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
                f"plan {path} has schema version {version!r}; this virnuc reads {SCHEMA_VERSION}: use the "
                "version that made it, or start over with --force."
            )
        fingerprint = document.pop("fingerprint")
        plan = from_json(RunPlan, document)
        rows = [0, *(shard.end for shard in plan.shards)]
        begins = [(shard.index, shard.begin) for shard in plan.shards]
        if begins != list(enumerate(rows[:-1])) or rows != sorted(rows):
            raise ValueError("its shards are not consecutive")
        if fingerprint != plan.fingerprint:
            raise DamagedFileError(f"plan {path} was modified after it was written: start over with --force.")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError) as error:
        raise DamagedFileError(
            f"plan {path} cannot be read ({error!r}): choose another --out, or delete the folder if it holds a run."
        ) from error
    return plan


def require_same_plan(existing: RunPlan, wanted: RunPlan, folder: RunFolder) -> None:
    """Rejects resuming a run with other settings or emergency switches.

    Raises:
        MismatchError: the results would differ; names each such field with both values.
    """
    old, new = existing.fingerprint_fields, wanted.fingerprint_fields
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not differing:
        return
    if existing.switches != wanted.switches:
        differing.append("switches")
    # Everything else about a model follows from its weights.
    other_models = {key.partition(".")[0] for key in differing if key.endswith(".weights_fingerprint")}
    lines = [
        f"  {key}: was {_shown(existing, key, old.get(key))}, now {_shown(wanted, key, new.get(key))}"
        for key in differing
        if key.partition(".")[0] not in other_models or key.endswith(".weights_fingerprint")
    ]
    raise MismatchError(
        "\n".join([f"{folder.root} contains a run with different settings:", *lines])
        + f"\nUse the old settings (see {folder.plan}), choose another --out, or start over with --force."
    )


def _shown(plan: RunPlan, key: str, value: Any) -> str:
    files = [file.name for file in plan.inputs]
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    names = {
        "input_digest": f"{', '.join(files[:3])}{more}",
        "head": plan.head.name if plan.head else "none",
        "shards": f"{len(plan.shards)} shards",
        "switches": ", ".join(plan.switches) or "none",
        **{f"{model.family}.weights_fingerprint": model.name for model in plan.models},
    }
    if key in names:
        return f"{names[key]} ({value[:12]})" if isinstance(value, str) else names[key]
    return "none" if value is None else str(value)
