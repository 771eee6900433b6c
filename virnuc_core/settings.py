"""Single definition of every setting: type, bounds, default and description.

Command line, variables, virnuc.toml, flows, Python API, MLflow and docs are made from these models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Help:
    """How help and docs show a setting, where its type and default do not say it.

    Attributes:
        metavar: placeholder of its value.
        default: in words, where the value is chosen later.
        short: flag of one letter.
        common: shown by --help; others by --help-all.
    """

    metavar: str = ""
    default: str = ""
    short: str = ""
    common: bool = False


def _split_devices(value: object) -> object:
    """Accepts "0,1" for ("0", "1")."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


# At least one codon; the upper bound catches typing errors.
ChunkLength = Annotated[int, Field(ge=3, le=10_000_000)]
# "auto" is resolved by `virnuc_core.models.catalogue.chunk_rule_of`.
AutoChunkLength = ChunkLength | Literal["auto"]
Count = Annotated[int, Field(gt=0)]
TokenBudget = Annotated[int, Field(gt=0, lt=1 << 31)]  # sums over batches stay within 64 bits
CountFromZero = Annotated[int, Field(ge=0)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|[0-9]+)$")]
Devices = Annotated[tuple[Device, ...], BeforeValidator(_split_devices)]
# As subflows of the run, or as separate runs for the workers of a pool.
LaneMode = Literal["local", "pool"]
# Which lanes go first, of the runs that share a pool.
Priority = Literal["urgent", "normal", "bulk"]
PositiveTime = Annotated[FiniteFloat, Field(gt=0)]
SettleTime = Annotated[FiniteFloat, Field(ge=0)]
Project = Annotated[str, Field(pattern=r"^[\w.@-]{0,64}$")]
# Tables have six decimals.
Probability = Annotated[FiniteFloat, Field(ge=1e-6, le=1 - 1e-6)]
Rate = Annotated[FiniteFloat, Field(gt=0, lt=1)]

_MODEL: Final = Help(metavar="NAME|PATH", common=True)
_PRESET_MODEL: Final = Help(metavar="NAME|PATH", default="by the preset", common=True)
_DNABERT_MODEL: Final = "DNABERT-S: tiny, a hub name or a path"
_ESM_MODEL: Final = "ESM-2: tiny, 8M, 35M, 150M, 650M, 3B, 15B, a hub name or a path"


class Settings(BaseModel):
    """Base class: frozen, and rejects unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @property
    def given(self) -> dict[str, Any]:
        """Settings that are not None."""
        return {name: value for name, value in self if value is not None}

    @property
    def params(self) -> dict[str, str | int | float | bool | None]:
        """Settings as MLflow parameters."""
        return {name: ",".join(value) if isinstance(value, tuple) else value for name, value in self}


class ProcessSettings(Settings):
    """Settings of the process that computes a run, which change nothing in its results."""

    threads: Annotated[
        Count | None, Help(default="OMP_NUM_THREADS, else the cores it may use", short="-t", common=True)
    ] = Field(default=None, description="CPU threads for all lanes together")


class EngineSettings(Settings):
    """Settings of every run that computes with models."""

    repr_layer: Annotated[CountFromZero | None, Help(default="last")] = Field(
        default=None, description="Layer of the ESM-2 representation, 0 to the number of layers"
    )
    precision: Annotated[
        Precision, Help(default="auto: fp16 on a GPU; on the CPU fp32, or bf16 for longest stretches")
    ] = Field(default="auto", description="Arithmetic of the models")
    devices: Annotated[Devices, Help(metavar="auto|cpu|0,1,...", common=True)] = Field(
        default=("auto",), description="Where to compute"
    )
    token_budget: Annotated[TokenBudget | None, Help(default="by the device")] = Field(
        default=None, description="Maximum number of tokens in one packed batch"
    )
    engine: Engine = Field(
        default="packed", description="reference: one sequence at a time, fp32, plain attention"
    )
    attention: AttentionChoice = Field(default="auto", description="Attention backend")
    compile: bool = Field(
        default=False, description="Compile the layers with torch.compile, which takes up to a minute"
    )
    shard_seconds: Annotated[PositiveTime | None, Help(default="60 on a GPU, 15 on the CPU")] = Field(
        default=None,
        description="Estimated work in a shard, in seconds, which is the most that a killed run loses",
    )


class EmbedSettings(EngineSettings):
    """Settings of `embed`: one model, one mean vector per sequence."""

    embeddings: Literal["float16", "float32"] = Field(default="float32", description="How vectors are stored")


class TwoModelSettings(EngineSettings):
    """Settings of runs with both models."""

    dnabert_precision: Annotated[Precision | None, Help(default="as precision")] = Field(
        default=None, description="Arithmetic of DNABERT-S alone"
    )
    dnabert_engine: Annotated[Engine | None, Help(default="as engine")] = Field(
        default=None, description="Engine of DNABERT-S alone"
    )


class ScoringSettings(TwoModelSettings):
    """Settings of runs that score chunks; None leaves the choice open."""

    chunk_length: Annotated[AutoChunkLength | None, Help(default="by the preset", common=True)] = Field(
        default=None,
        description="Chunk length in bp; auto: what the head is for, by record length for longest frames",
    )
    min_length: CountFromZero = Field(default=0, description="Leave out records of fewer bases")
    threshold: Annotated[Probability, Help(common=True)] = Field(
        default=0.5,
        description="Call chunks and contigs virus from this probability on, from 0.000001 to 0.999999",
    )
    fdr: Annotated[Rate | None, Help(default="off", common=True)] = Field(
        default=None,
        description="Instead of from --threshold on, call contigs virus so that at most this share of the calls is "
        "expected to be false; for heads for the longest stretches",
    )
    esm_model: Annotated[str | None, _PRESET_MODEL] = Field(default=None, description=_ESM_MODEL)
    dnabert_model: Annotated[str | None, _PRESET_MODEL] = Field(default=None, description=_DNABERT_MODEL)
    head: Annotated[str | None, Help(metavar="PATH", default="the bundled one", common=True)] = Field(
        default=None, description="Classifier head that was trained on these models"
    )
    embeddings: EmbeddingsDtype = Field(
        default="float32", description="How vectors are stored in embeddings.h5"
    )

    @model_validator(mode="after")
    def _require_one_rule(self) -> "ScoringSettings":
        if self.fdr is not None and self.threshold != type(self).model_fields["threshold"].default:
            raise UsageError(
                f"--fdr {self.fdr:g} finds a threshold of its own: leave out --threshold {self.threshold:g}, or --fdr."
            )
        return self


class PredictSettings(ScoringSettings):
    """Settings of `predict` and `evaluate`; None leaves the choice to the preset."""

    preset: Annotated[Preset, Help(default="tiny: the bundled small models", common=True)] = Field(
        default="tiny", description="Models and chunk length that belong together"
    )


class RunConfig(ScoringSettings):
    """A run as passed to the planner, presets applied; "auto" and None are resolved when planning."""

    chunk_length: AutoChunkLength | None = Field(
        default="auto", description="Chunk length in bp; None embeds whole sequences"
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

    chunk_length: Annotated[ChunkLength, Help(common=True)] = Field(
        default=500, description="Chunk length in bp that the head is for"
    )
    esm_model: Annotated[str, _MODEL] = Field(default="tiny", description=_ESM_MODEL)
    dnabert_model: Annotated[str, _MODEL] = Field(default="tiny", description=_DNABERT_MODEL)
    frames: FrameRule = Field(
        default="longest",
        description="What the head is for: the longest stop-free stretches of a chunk, or its open reading frames, as "
        "VirNucPro has them",
    )
    groups: Annotated[str | None, Help(metavar="TSV", default="none", common=True)] = Field(
        default=None, description="Table of record and group: the records of a group are not split"
    )
    seed: CountFromZero = Field(default=0, description="Seed of the split, the weights and the draws")
    held_out: Annotated[FiniteFloat, Field(gt=0, lt=0.5)] = Field(
        default=0.1, description="Share of the groups of a class for validation, and again for the test"
    )
    group_power: Annotated[FiniteFloat, Field(ge=0, le=1)] = Field(
        default=0.6, description="A group is sampled in proportion to its size to this power"
    )
    most_frames: Count = Field(default=200_000, description="About how many frames are used at most")
    epochs: Count = Field(default=20, description="Maximum number of epochs")
    members: Annotated[int, Field(ge=1, le=16)] = Field(
        default=2,
        description="Only for open reading frames: heads fitted from different seeds, whose mean is the output",
    )


class FramesSettings(Settings):
    """Settings of `frames`."""

    chunk_length: Annotated[ChunkLength, Help(common=True)] = Field(description="Chunk length in bp")


class LaneSettings(Settings):
    """Where lanes run, and in a pool how much work each gets, and for which project."""

    mode: LaneMode = Field(
        default="local", description="pool: lanes wait for the workers of a Prefect work pool, on any host"
    )
    lane_minutes: PositiveTime = Field(
        default=10.0, description="Estimated work of a lane in a pool, in minutes"
    )
    priority: Priority = Field(default="normal", description="Queue in which the lanes wait in a pool")
    project: Annotated[Project, Help(metavar="NAME", default="none")] = Field(
        default="", description="Project that the GPU hours count for"
    )


def help_of(field: FieldInfo) -> Help:
    """How a setting is shown."""
    return next((each for each in field.metadata if isinstance(each, Help)), Help())


# Defaults of flows, which their signatures show.
EMBED_DEFAULTS: Final = EmbedSettings.model_construct()
LANE_DEFAULTS: Final = LaneSettings.model_construct()
PREDICT_DEFAULTS: Final = PredictSettings.model_construct()
TRAIN_DEFAULTS: Final = TrainSettings.model_construct()

PRESETS: Final[Mapping[Preset, Mapping[str, Any]]] = {
    "tiny": {"chunk_length": "auto", "esm_model": "tiny", "dnabert_model": "tiny"},
    "virnucpro-500": {"chunk_length": 500, "esm_model": "3B", "dnabert_model": "DNABERT-S"},
    "virnucpro-300": {"chunk_length": 300, "esm_model": "3B", "dnabert_model": "DNABERT-S"},
}

_Settings = TypeVar("_Settings", bound=Settings)


def read_settings(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Validates plain values.

    Raises:
        UsageError: values are unknown, of the wrong type or out of range; all such fields are named.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UsageError(faults_in_words(error, str)) from error


def faults_in_words(error: ValidationError, name_of: Callable[[str], str]) -> str:
    """What is wrong with which settings, each named by `name_of` its field."""
    reasons: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for fault in error.errors():
        name = name_of(str(fault["loc"][0]))
        reasons.setdefault(name, []).append(fault["msg"])
        given[name] = "" if fault["type"] == "missing" else f" (given {fault['input']!r:.60})"
    listed = "; ".join(f"{name}: {', or '.join(texts)}{given[name]}" for name, texts in reasons.items())
    return f"these settings cannot be used: {listed}. See docs/configuration.md for the values."


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
