"""Single definition of every setting: type, bounds, default and description.

Command line, settings files, environment variables, flows, Python API, MLflow and docs are generated from these models.
A description may end with the default in brackets.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Optional, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from virnuc_core.errors import UsageError
from virnuc_core.specs import (
    AttentionChoice,
    EmbeddingsDtype,
    Engine,
    Family,
    FrameRule,
    Precision,
    Preset,
)


class Metavar(str):
    """Placeholder of a value in the command-line help."""


def _split_devices(value: object) -> object:
    """Accepts "0,1" for ("0", "1")."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


# At least one codon; the upper bound catches typing errors.
ChunkLength = Annotated[int, Field(ge=3, le=10_000_000), Metavar("K")]
# "auto" is resolved by `virnuc_core.models.catalogue.chunk_rule_of`.
AutoChunkLength = Annotated[Annotated[int, Field(ge=3, le=10_000_000)] | Literal["auto"], Metavar("auto|K")]
Count = Annotated[int, Field(gt=0), Metavar("N")]
TokenBudget = Annotated[int, Field(gt=0, lt=1 << 31), Metavar("N")]  # sums over batches stay within 64 bits
CountFromZero = Annotated[int, Field(ge=0), Metavar("N")]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|[0-9]+)$")]
Devices = Annotated[tuple[Device, ...], BeforeValidator(_split_devices), Metavar("auto|cpu|0,1,...")]
HeadPath = Annotated[str, Metavar("PATH")]
# As subflows of the run, or as separate runs for the workers of a pool.
LaneMode = Literal["local", "pool"]
# Which lanes go first, of the runs that share a pool.
Priority = Literal["urgent", "normal", "bulk"]
ModelName = Annotated[str, Metavar("NAME|PATH")]
PositiveTime = Annotated[FiniteFloat, Field(gt=0)]
SettleTime = Annotated[FiniteFloat, Field(ge=0)]
Project = Annotated[str, Field(pattern=r"^[\w.@-]{0,64}$"), Metavar("NAME")]
# Tables have six decimals.
Probability = Annotated[FiniteFloat, Field(ge=1e-6, le=1 - 1e-6), Metavar("P")]
Rate = Annotated[FiniteFloat, Field(gt=0, lt=1), Metavar("F")]

_THRESHOLD: Final = 0.5
_CHUNK_LENGTH: Final = "Chunk length in bp"
_DEVICES: Final = "Where to compute"
_DNABERT_MODEL: Final = "DNABERT-S: tiny, a hub name or a path"
_EMBEDDINGS: Final = "How vectors are stored in embeddings.h5"
_ESM_MODEL: Final = "ESM-2: tiny, 8M, 35M, 150M, 650M, 3B, 15B, a hub name or a path"


class Settings(BaseModel):
    """Base class: frozen, and rejects unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def given(self) -> dict[str, Any]:
        """Settings that are not None."""
        return {name: value for name, value in self if value is not None}

    @property
    def params(self) -> dict[str, str | int | float | bool | None]:
        """Settings as MLflow parameters."""
        return {name: ",".join(value) if isinstance(value, tuple) else value for name, value in self}


class EngineSettings(Settings):
    """Settings of every run that computes with models."""

    repr_layer: CountFromZero | None = Field(
        default=None, description="Layer of the ESM-2 representation, 0 to the number of layers [last]"
    )
    precision: Precision = Field(
        default="auto",
        description="Arithmetic of the models [auto: fp16 on a GPU; on the CPU fp32, or bf16 for longest stretches]",
    )
    devices: Devices = Field(default=("auto",), description=_DEVICES)
    token_budget: TokenBudget | None = Field(
        default=None, description="Maximum number of tokens in one packed batch [by the device]"
    )
    engine: Engine = Field(
        default="packed", description="reference: one sequence at a time, fp32, plain attention"
    )
    attention: AttentionChoice = Field(default="auto", description="Attention backend")
    compile: bool = Field(
        default=False, description="Compile the layers with torch.compile, which takes up to a minute"
    )
    shard_seconds: Annotated[PositiveTime, Metavar("S")] | None = Field(
        default=None,
        description="Estimated work in a shard, in seconds, which is the most that a killed run loses "
        "[60 on a GPU, 15 on the CPU]",
    )


class EmbedSettings(EngineSettings):
    """Settings of `embed`: one model, one mean vector per sequence."""

    embeddings: Literal["float16", "float32"] = Field(default="float32", description="How vectors are stored")


class TwoModelSettings(EngineSettings):
    """Settings of runs with both models."""

    dnabert_precision: Precision | None = Field(
        default=None, description="Arithmetic of DNABERT-S alone [as precision]"
    )
    dnabert_engine: Engine | None = Field(default=None, description="Engine of DNABERT-S alone [as engine]")


class ScoringSettings(TwoModelSettings):
    """Settings of runs that score chunks; None leaves the choice open."""

    chunk_length: AutoChunkLength | None = Field(
        default=None,
        description=f"{_CHUNK_LENGTH}; auto: what the head is for, by record length for longest frames "
        "[by the preset]",
    )
    min_length: CountFromZero = Field(default=0, description="Leave out records of fewer bases")
    threshold: Probability = Field(
        default=_THRESHOLD,
        description="Call chunks and contigs virus from this probability on, from 0.000001 to 0.999999",
    )
    fdr: Rate | None = Field(
        default=None,
        description="Instead of from --threshold on, call contigs virus so that at most this share of the calls is expected "
        "to be false; for heads for the longest stretches [off]",
    )
    esm_model: ModelName | None = Field(default=None, description=f"{_ESM_MODEL} [by the preset]")
    dnabert_model: ModelName | None = Field(default=None, description=f"{_DNABERT_MODEL} [by the preset]")
    head: HeadPath | None = Field(
        default=None, description="Classifier head that was trained on these models [the bundled one]"
    )
    embeddings: EmbeddingsDtype = Field(default="float32", description=_EMBEDDINGS)

    @model_validator(mode="after")
    def _require_one_rule(self) -> "ScoringSettings":
        if self.fdr is not None and self.threshold != _THRESHOLD:
            raise UsageError(
                f"--fdr {self.fdr:g} finds a threshold of its own: leave out --threshold {self.threshold:g}, or --fdr."
            )
        return self


class PredictSettings(ScoringSettings):
    """Settings of `predict` and `evaluate`; None leaves the choice to the preset."""

    preset: Preset = Field(
        default="tiny",
        description="Models and chunk length that belong together [tiny: the bundled small models]",
    )


class RunConfig(ScoringSettings):
    """A run as passed to the planner, presets applied; "auto" and None are resolved when planning."""

    chunk_length: AutoChunkLength | None = Field(
        default="auto", description=f"{_CHUNK_LENGTH}; None embeds whole sequences"
    )
    esm_model: str | None = Field(default="tiny", description="ESM-2; None embeds DNA only")
    dnabert_model: str | None = Field(default="tiny", description="DNABERT-S; None embeds proteins only")
    frames: FrameRule | None = Field(
        default=None, description="What is embedded of a chunk; None: what the head was trained for"
    )
    switches: tuple[str, ...] | None = Field(
        default=None,
        description="Emergency switches (VIRNUC_DISABLE_FP16, ...), which win over the rest; None takes those of the "
        "process that makes the plan",
    )


class TrainSettings(TwoModelSettings):
    """Settings of `train`: the models to embed with, and how the head is fitted."""

    chunk_length: ChunkLength = Field(default=500, description=f"{_CHUNK_LENGTH} that the head is for")
    esm_model: ModelName = Field(default="tiny", description=_ESM_MODEL)
    dnabert_model: ModelName = Field(default="tiny", description=_DNABERT_MODEL)
    frames: FrameRule = Field(
        default="longest",
        description="What the head is for: the longest stop-free stretches of a chunk, or its open reading frames, as "
        "VirNucPro has them",
    )
    groups: Annotated[str, Metavar("TSV")] | None = Field(
        default=None, description="Table of record and group: the records of a group are not split"
    )
    seed: CountFromZero = Field(default=0, description="Seed of the split, the weights and the draws")
    held_out: Annotated[FiniteFloat, Field(gt=0, lt=0.5), Metavar("SHARE")] = Field(
        default=0.1, description="Share of the groups of a class for validation, and again for the test"
    )
    group_power: Annotated[FiniteFloat, Field(ge=0, le=1), Metavar("P")] = Field(
        default=0.6, description="A group is sampled in proportion to its size to this power"
    )
    most_frames: Count = Field(default=200_000, description="About how many frames are used at most")
    epochs: Count = Field(default=20, description="Maximum number of epochs")
    members: Annotated[int, Field(ge=1, le=16), Metavar("N")] = Field(
        default=2,
        description="Only for open reading frames: heads fitted from different seeds, whose mean is the output",
    )


def _optional(fields: Mapping[str, FieldInfo], otherwise: str) -> type[Settings]:
    """A model of these fields with the default None, which is described as `otherwise`."""
    optional: dict[str, Any] = {}
    for name, field in fields.items():
        meaning = (field.description or "").partition(" [")[0]
        arms: Any = Optional[field.rebuild_annotation()]  # noqa: UP045 (a value, not an annotation)
        optional[name] = (arms, Field(default=None, description=f"{meaning} [{otherwise}]"))
    return create_model("OptionalSettings", __base__=Settings, **optional)


class LaneSettings(Settings):
    """Where lanes run, how much work each gets, and for which project."""

    mode: LaneMode = Field(
        default="local", description="pool: lanes wait for the workers of a Prefect work pool, on any host"
    )
    lane_minutes: Annotated[PositiveTime, Metavar("M")] = Field(
        default=10.0, description="Estimated work of a lane in a pool, in minutes"
    )
    priority: Priority = Field(default="normal", description="Queue in which the lanes wait in a pool")
    project: Project = Field(default="", description="Project that the GPU hours count for [none]")


class BatchSettings(LaneSettings):
    """How a nightly batch works through its files."""

    files_at_once: Count = Field(
        default=8, description="Number of files whose runs wait or work at a time in a pool"
    )
    settle_seconds: Annotated[SettleTime, Metavar("S")] = Field(
        default=60.0, description="Leave files alone that changed in the last so many seconds"
    )


_DEPLOYED: Final = {
    name: field
    for name, field in {**PredictSettings.model_fields, **BatchSettings.model_fields}.items()
    if name != "mode"  # a deployed batch works in the pool
}


class NightlySettings(_optional(_DEPLOYED, "as deployed")):  # type: ignore[misc]
    """Settings of the nightly batch, for `deploy`; None keeps what is deployed."""

    @property
    def of_predict(self) -> dict[str, Any]:
        """Those given of the batch's runs."""
        return {name: value for name, value in self.given.items() if name in PredictSettings.model_fields}

    @property
    def of_batch(self) -> dict[str, Any]:
        """Those given of the batch itself."""
        return {name: value for name, value in self.given.items() if name in BatchSettings.model_fields}


class FramesSettings(Settings):
    """Settings of `frames`."""

    chunk_length: ChunkLength = Field(description=_CHUNK_LENGTH)


EMBED_DEFAULTS: Final = EmbedSettings()
LANE_DEFAULTS: Final = LaneSettings()
PREDICT_DEFAULTS: Final = PredictSettings()
TRAIN_DEFAULTS: Final = TrainSettings()

PRESETS: Final[Mapping[Preset, Mapping[str, Any]]] = {
    "tiny": {"chunk_length": "auto", "esm_model": "tiny", "dnabert_model": "tiny"},
    "virnucpro-500": {"chunk_length": 500, "esm_model": "3B", "dnabert_model": "DNABERT-S"},
    "virnucpro-300": {"chunk_length": 300, "esm_model": "3B", "dnabert_model": "DNABERT-S"},
}


def value_kind(field: FieldInfo) -> Any:
    """The class or Literal of a setting's value, without None and bounds, or a union of an int and a Literal."""
    arms = [arm for arm in get_args(field.annotation) if arm is not NoneType]
    kind = arms[0] if get_origin(field.annotation) in (Union, UnionType) else field.annotation
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def metavar_of(field: FieldInfo) -> str | None:
    """The command-line placeholder; None for a choice or a switch."""
    metadata = [*field.metadata, *(each for arm in get_args(field.annotation) for each in get_args(arm)[1:])]
    return next((str(each) for each in metadata if isinstance(each, Metavar)), None)


def help_text(field: FieldInfo) -> str:
    """The description, with the default appended in brackets."""
    text, default = field.description or "", field.default
    if text.endswith("]") or default in (None, (), False, PydanticUndefined):
        return f"{text}."
    if isinstance(default, tuple):
        default = ",".join(default)
    return f"{text} [{default:g}]." if isinstance(default, float) else f"{text} [{default}]."


_Settings = TypeVar("_Settings", bound=Settings)


def read_settings(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Validates plain values.

    Raises:
        UsageError: values are unknown, of the wrong type or out of range; all such fields are named.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']} (given {fault['input']!r})"
            for fault in error.errors()
        )
        raise UsageError(
            f"these settings cannot be used: {faults}. See --help or docs/configuration.md for the values."
        ) from error


def predict_config(settings: PredictSettings) -> RunConfig:
    """The run of `predict`: given settings override the preset."""
    given = {name: value for name, value in settings.given.items() if name != "preset"}
    return RunConfig(**{**PRESETS[settings.preset], **given})


def embed_config(family: Family, model: str, settings: EngineSettings) -> RunConfig:
    """The run of `embed`: whole sequences, one model, no head."""
    return RunConfig(
        chunk_length=None,
        esm_model=model if family == "esm2" else None,
        dnabert_model=model if family == "dnabert_s" else None,
        frames="open",
        **settings.given,
    )


def train_config(settings: TrainSettings) -> RunConfig:
    """The run that computes the training vectors: chunks, no head."""
    return RunConfig(**{name: value for name, value in settings if name in RunConfig.model_fields})


_origins: ContextVar[Mapping[str, str] | None] = ContextVar("settings_from", default=None)


@contextmanager
def settings_given(origins: Mapping[str, str]) -> Iterator[None]:
    """Sets, for runs in this block, the origin (flag, variable, or file and section) of each setting given explicitly."""
    token = _origins.set(origins)
    try:
        yield
    finally:
        _origins.reset(token)


def settings_from() -> dict[str, str] | None:
    """Origin of each setting given explicitly; None for a run not started from the command line."""
    origins = _origins.get()
    return None if origins is None else dict(origins)
