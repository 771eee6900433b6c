"""What a person may ask of a run, checked by field, and how presets turn it into one RunConfig.

The models here are the parameters of the Prefect flows as well as the flags of the command line, so a wrong
value is refused in the same words at both doors, before anything runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from virnuc_core.errors import UsageError
from virnuc_core.inference.plan import RunPlan
from virnuc_core.models.catalogue import AUTO_HEAD
from virnuc_core.specs import (
    AttentionChoice,
    CompileMode,
    EmbeddingsDtype,
    Engine,
    Family,
    Precision,
    Preset,
    RunConfig,
)


def _split_devices(value: object) -> object:
    """Lets "0,1" stand for ("0", "1")."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


# A frame holds whole codons; an upper bound turns away a slip of the keyboard, not a genome.
ChunkLength = Annotated[int, Field(ge=3, le=10_000_000)]
PositiveTime = Annotated[FiniteFloat, Field(gt=0)]
# Where lanes run: as subflows of the run itself, or as runs of their own that workers of a pool pick up.
LaneMode = Literal["local", "pool"]
Probability = Annotated[FiniteFloat, Field(gt=0, lt=1)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|[0-9]+)$")]


class EngineSettings(BaseModel):
    """Settings that every run over models has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repr_layer: NonNegativeInt | None = Field(
        default=None, description="Layer of the ESM-2 representation; the last by default"
    )
    precision: Precision = Field(default="auto", description="Arithmetic of the forward pass")
    devices: Annotated[tuple[Device, ...], BeforeValidator(_split_devices)] = Field(
        default=("auto",), description='"auto", "cpu", or CUDA device numbers'
    )
    token_budget: PositiveInt | None = Field(default=None, description="Most tokens in one packed batch")
    engine: Engine = Field(default="packed", description='"reference" runs one sequence at a time in fp32')
    attention: AttentionChoice = Field(default="auto", description="Attention backend")
    compile_mode: CompileMode = Field(
        default="auto", description='torch.compile of the layers; "auto" does it in runs long enough'
    )
    shard_seconds: PositiveTime | None = Field(
        default=None, description="Estimated work in a shard, in seconds: what a killed run loses at most"
    )


class PredictSettings(EngineSettings):
    """Settings of `predict`; None leaves the choice to the preset."""

    preset: Preset = Field(default="tiny", description="Models and chunk length that belong together")
    chunk_length: ChunkLength | None = Field(default=None, description="Chunk length in bp")
    min_length: NonNegativeInt = Field(default=0, description="Records of fewer bases are not used")
    threshold: Probability = Field(
        default=0.5, description="p_virus from which chunks and contigs are called virus"
    )
    esm_model: str | None = Field(default=None, description="ESM-2: catalogue name, hub name or path")
    dnabert_model: str | None = Field(default=None, description="DNABERT-S: catalogue name, hub name or path")
    head: str | None = Field(default=None, description="Classifier head file")
    dna_head: str | None = Field(
        default=None,
        description='Head that scores chunks without an open frame by their DNA alone; "auto" for the bundled one',
    )
    dnabert_precision: Precision | None = Field(
        default=None, description="Arithmetic of DNABERT-S alone; as `precision` by default"
    )
    dnabert_engine: Engine | None = Field(
        default=None, description="Engine of DNABERT-S alone; as `engine` by default"
    )
    embeddings: EmbeddingsDtype = Field(
        default="float32", description='How vectors are stored; "none" keeps scores only'
    )


class TrainSettings(EngineSettings):
    """Settings of `train`: the models whose vectors the head takes, and how it is fitted."""

    chunk_length: ChunkLength = Field(default=500, description="Chunk length in bp")
    esm_model: str = Field(default="tiny", description="ESM-2: catalogue name, hub name or path")
    dnabert_model: str = Field(default="tiny", description="DNABERT-S: catalogue name, hub name or path")
    dnabert_precision: Precision | None = Field(
        default=None, description="Arithmetic of DNABERT-S alone; as `precision` by default"
    )
    dnabert_engine: Engine | None = Field(
        default=None, description="Engine of DNABERT-S alone; as `engine` by default"
    )
    dna_alone: bool = Field(
        default=False,
        description="The head takes the DNA vector alone: for chunks without an open frame, which it is trained on",
    )
    groups: str | None = Field(
        default=None, description="Table of records and the groups that must stay together"
    )
    seed: NonNegativeInt = Field(default=0, description="Of the split, the weights and the draws")
    held_out: Annotated[FiniteFloat, Field(gt=0, lt=0.5)] = Field(
        default=0.1, description="Share of the groups of a class for validation, and again for the test"
    )
    group_power: Annotated[FiniteFloat, Field(ge=0, le=1)] = Field(
        default=0.6, description="How often a group is drawn: by its size to this power"
    )
    most_frames: PositiveInt = Field(
        default=200_000, description="About how many frames are learnt from at most"
    )
    epochs: PositiveInt = Field(default=20, description="Most rounds")
    members: Annotated[int, Field(ge=1, le=16)] = Field(
        default=2, description="Heads fitted from different seeds, side by side in one"
    )


class ReprocessSettings(BaseModel):
    """Settings of `reprocess`; None leaves what the run was made with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    esm_model: str | None = Field(default=None, description="ESM-2: catalogue name, hub name or path")
    dnabert_model: str | None = Field(default=None, description="DNABERT-S: catalogue name, hub name or path")
    head: str | None = Field(default=None, description="Classifier head file; to be given with another model")
    dna_head: str | None = Field(
        default=None, description="Another head for chunks without an open frame, of a run that has one"
    )
    repr_layer: NonNegativeInt | None = Field(default=None, description="Layer of the ESM-2 representation")
    precision: Precision | None = Field(default=None, description="Arithmetic of both models")
    dnabert_precision: Precision | None = Field(default=None, description="Arithmetic of DNABERT-S alone")
    token_budget: PositiveInt | None = Field(default=None, description="Most tokens in one packed batch")
    engine: Engine | None = Field(default=None, description="Engine of both models")
    dnabert_engine: Engine | None = Field(default=None, description="Engine of DNABERT-S alone")
    attention: AttentionChoice | None = Field(default=None, description="Attention backend")
    compile_mode: CompileMode | None = Field(default=None, description="torch.compile of the layers")
    embeddings: EmbeddingsDtype | None = Field(default=None, description="How vectors are stored")
    devices: Annotated[tuple[Device, ...], BeforeValidator(_split_devices)] = Field(
        default=("auto",), description='"auto", "cpu", or CUDA device numbers'
    )


class EmbedSettings(EngineSettings):
    """Settings of `embed`: one model, one mean vector a sequence."""

    embeddings: Literal["float16", "float32"] = Field(default="float32", description="How vectors are stored")


class LaneSettings(BaseModel):
    """Where and in what portions the work over models is done; parameters of the flows that need not be set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: LaneMode = Field(default="local", description="Lanes on this machine, or through a work pool")
    lane_minutes: PositiveTime = Field(
        default=10.0, description="Estimated work of a lane in a pool, in minutes"
    )


class FramesSettings(BaseModel):
    """Settings of `frames`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_length: ChunkLength = Field(description="Chunk length in bp")


PREDICT_DEFAULTS: Final = PredictSettings()
EMBED_DEFAULTS: Final = EmbedSettings()
TRAIN_DEFAULTS: Final = TrainSettings()
REPROCESS_DEFAULTS: Final = ReprocessSettings()
LANE_DEFAULTS: Final = LaneSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetChoice:
    """The models and the chunk length that a preset stands for."""

    chunk_length: int
    esm_model: str
    dnabert_model: str


PRESETS: Final[Mapping[Preset, PresetChoice]] = {
    "tiny": PresetChoice(chunk_length=500, esm_model="tiny", dnabert_model="tiny"),
    "virnucpro-500": PresetChoice(chunk_length=500, esm_model="3B", dnabert_model="DNABERT-S"),
    "virnucpro-300": PresetChoice(chunk_length=300, esm_model="3B", dnabert_model="DNABERT-S"),
}

_Settings = TypeVar("_Settings", bound=BaseModel)


def read_settings(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Checks plain values.

    Raises:
        UsageError: a value is of the wrong kind or out of range; all such fields are named.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']} (given {fault['input']!r})"
            for fault in error.errors()
        )
        raise UsageError(f"these settings cannot be used: {faults}. See --help for the values.") from error


def predict_config(settings: PredictSettings) -> RunConfig:
    """The run that `predict` does with these settings: what is given wins over the preset."""
    preset = PRESETS[settings.preset]
    return RunConfig(
        chunk_length=settings.chunk_length or preset.chunk_length,
        esm_model=settings.esm_model or preset.esm_model,
        dnabert_model=settings.dnabert_model or preset.dnabert_model,
        head=settings.head,
        dna_head=settings.dna_head,
        dnabert_precision=settings.dnabert_precision,
        dnabert_engine=settings.dnabert_engine,
        embeddings=settings.embeddings,
        min_length=settings.min_length,
        threshold=settings.threshold,
        **_engine_values(settings),
    )


def embed_config(family: Family, model: str, settings: EmbedSettings) -> RunConfig:
    """The run that `embed` does with these settings: whole sequences, one model, no head."""
    return RunConfig(
        chunk_length=None,
        esm_model=model if family == "esm2" else None,
        dnabert_model=model if family == "dnabert_s" else None,
        embeddings=settings.embeddings,
        **_engine_values(settings),
    )


def train_config(settings: TrainSettings) -> RunConfig:
    """The run that gives the vectors to train on: those of chunks, without a head."""
    return RunConfig(
        chunk_length=settings.chunk_length,
        esm_model=None if settings.dna_alone else settings.esm_model,
        dnabert_model=settings.dnabert_model,
        dnabert_precision=settings.dnabert_precision,
        dnabert_engine=settings.dnabert_engine,
        embeddings="float32",
        **_engine_values(settings),
    )


def reprocess_config(plan: RunPlan, settings: ReprocessSettings) -> RunConfig:
    """The run that a planned run with both models is moved to: what is not given is as it was.

    What goes with something that is given is found again: layer and head with a model, precision and attention with
    an engine, attention with a precision.
    """
    esm2, dnabert = plan.model("esm2"), plan.model("dnabert_s")
    if esm2 is None or dnabert is None or plan.head is None:
        raise UsageError("only a run with an ESM-2 model, a DNABERT-S model and a head can be reprocessed.")
    if settings.dna_head is not None and plan.dna_head is None:
        raise UsageError(
            "this run has no rows for chunks without an open frame: make a new one with --dna-head."
        )
    other_models = settings.esm_model is not None or settings.dnabert_model is not None
    dna_head = settings.dna_head
    if plan.dna_head is not None and dna_head is None:
        dna_head = AUTO_HEAD if settings.dnabert_model is not None else plan.dna_head.location
    same_engine = settings.engine is None and settings.dnabert_engine is None
    same_precision = settings.precision is None and settings.dnabert_precision is None
    attention: AttentionChoice = "auto"
    packed = {model.attention for model in (esm2, dnabert) if model.engine == "packed"}
    if same_engine and same_precision and len(packed) == 1:
        [used] = packed
        attention = used if used != "padded" else "auto"
    same_layer = settings.repr_layer is None and settings.esm_model is None
    return RunConfig(
        chunk_length=plan.chunk_length,
        esm_model=settings.esm_model or esm2.location,
        dnabert_model=settings.dnabert_model or dnabert.location,
        head=settings.head or (None if other_models else plan.head.location),
        dna_head=dna_head,
        repr_layer=esm2.repr_layer if same_layer else settings.repr_layer,
        precision=settings.precision or (esm2.precision if same_engine else "auto"),
        dnabert_precision=settings.dnabert_precision
        or (dnabert.precision if same_engine and settings.precision is None else None),
        devices=settings.devices,
        token_budget=settings.token_budget,
        engine=settings.engine or esm2.engine,
        dnabert_engine=settings.dnabert_engine or (dnabert.engine if settings.engine is None else None),
        attention=settings.attention or attention,
        compile_mode=settings.compile_mode or "auto",
        embeddings=settings.embeddings or plan.embeddings,
        min_length=plan.min_length,
        threshold=plan.threshold,
    )


def _engine_values(settings: EngineSettings) -> dict[str, Any]:
    """The settings that every run over models has; they are called the same in a RunConfig."""
    return settings.model_dump(include=set(EngineSettings.model_fields))
