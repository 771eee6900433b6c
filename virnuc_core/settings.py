"""Single definition of every setting: type, bounds, default and description.

Command line, variables, virnuc.toml, flows, Python API, MLflow and docs are made from these models.
"""

from collections.abc import Callable, Mapping
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
    CallRule,
    EmbeddingsDtype,
    Engine,
    Family,
    FrameRule,
    Precision,
    Preset,
)

_Settings = TypeVar("_Settings", bound="Settings")

# At least one codon; the upper bound catches typing errors.
ChunkLength = Annotated[int, Field(ge=3, le=10_000_000)]
Count = Annotated[int, Field(gt=0)]
CountFromZero = Annotated[int, Field(ge=0)]
Devices = Annotated[
    tuple[Annotated[str, Field(pattern=r"^(auto|cpu|[0-9]+)$")], ...],
    BeforeValidator(
        lambda value: [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    ),
]
# As subflows of the run, or as separate runs for the workers of a pool.
LaneMode = Literal["local", "pool"]
# Which lanes go first, of the runs that share a pool.
Priority = Literal["urgent", "normal", "bulk"]
PositiveTime = Annotated[FiniteFloat, Field(gt=0)]
Share = Annotated[FiniteFloat, Field(gt=0, lt=1)]
SettleTime = Annotated[FiniteFloat, Field(ge=0)]


class InWords(str):
    """The default of a setting as help and docs show it, where the value is chosen later."""


def _setting(value: Any, description: str, in_words: str = "") -> Any:
    """A field with this default, `...` for none."""
    field = Field(value, description=description)
    field.metadata.append(InWords(in_words))
    return field


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

    threads: Count | None = _setting(
        None,
        "Total number of CPU threads",
        "OMP_NUM_THREADS, else all available cores",
    )


class EngineSettings(Settings):
    """Settings of every run that computes with models."""

    repr_layer: CountFromZero | None = _setting(
        None, "ESM-2 layer to take embeddings from, 0 to the number of layers", "last"
    )
    precision: Precision = _setting(
        "auto",
        "Numeric precision of the models",
        "auto: fp16 on a GPU; on the CPU fp32, or bf16 for the longest ORFs",
    )
    devices: Devices = _setting(("auto",), "Devices to use")
    # Sums over batches stay within 64 bits.
    token_budget: Annotated[int, Field(gt=0, lt=1 << 31)] | None = _setting(
        None, "Maximum number of tokens per batch", "set by the device"
    )
    engine: Engine = _setting(
        "packed", "packed, or reference: one sequence at a time in fp32 with plain attention"
    )
    attention: AttentionChoice = _setting("auto", "Attention backend")
    compile: bool = _setting(False, "Compile the layers with torch.compile (takes up to a minute)")
    shard_seconds: PositiveTime | None = _setting(
        None,
        "Estimated seconds of work per shard: the maximum lost on interruption",
        "60 on a GPU, 15 on the CPU",
    )


class EmbedSettings(EngineSettings):
    """Settings of `embed`: one model, one mean vector per sequence."""

    embeddings: Literal["float16", "float32"] = _setting("float32", "Data type of the stored embeddings")


class TwoModelSettings(EngineSettings):
    """Settings of runs with both models."""

    dnabert_precision: Precision | None = _setting(
        None, "Numeric precision of DNABERT-S only", "same as precision"
    )
    dnabert_engine: Engine | None = _setting(None, "Engine of DNABERT-S only", "same as engine")


def _model_setting(value: str | None, family: Family) -> Any:
    known = "DNABERT-S: tiny" if family == "dnabert_s" else "ESM-2: tiny, 8M, 35M, 150M, 650M, 3B, 15B"
    default = "" if value else "set by the preset"
    return _setting(value, f"{known}, a Hugging Face name or a path", default)


class ScoringSettings(TwoModelSettings):
    """Settings of runs that score chunks; None leaves the choice open."""

    chunk_length: ChunkLength | Literal["auto"] | None = _setting(
        None,
        "Chunk length in bp; auto: as the head was trained, by sequence length for longest ORFs",
        "set by the preset",
    )
    min_length: CountFromZero = _setting(0, "Skip sequences shorter than N bp")
    fdr: Share | None = _setting(None, "Target false discovery rate", "off")
    relaxed: bool = _setting(False, "Same as --threshold 0.5: more viruses, more false positives")
    # Tables have six decimals.
    threshold: Annotated[FiniteFloat, Field(ge=1e-6, le=1 - 1e-6)] | None = _setting(
        None, "Minimum virus_score for a viral call (replaces --fdr)", "off"
    )
    prior: Share | None = _setting(None, "Fraction of viruses in the sample", "estimated from the scores")
    esm_model: str | None = _model_setting(None, "esm2")
    dnabert_model: str | None = _model_setting(None, "dnabert_s")
    head: str | None = _setting(None, "Classifier head trained on these models", "the bundled one")
    embeddings: EmbeddingsDtype = _setting("float32", "Data type of embeddings.h5")

    @model_validator(mode="after")
    def _require_one_rule(self) -> "ScoringSettings":
        fixed = [f"--{name}" for name in ("relaxed", "threshold") if getattr(self, name)]
        by_sample = [f"--{name}" for name in ("fdr", "prior") if getattr(self, name) is not None]
        if len(fixed) > 1 or (fixed and by_sample):
            raise UsageError(f"{' and '.join(fixed + by_sample)} cannot be combined: give one of them.")
        return self

    @property
    def calls(self) -> CallRule:
        """How contigs are called."""
        return CallRule(threshold=0.5 if self.relaxed else self.threshold, fdr=self.fdr, prior=self.prior)


class PredictSettings(ScoringSettings):
    """Settings of `predict` and `evaluate`; None leaves the choice to the preset."""

    preset: Preset = _setting("tiny", "Matching models and chunk length", "tiny: the bundled small models")


class RunConfig(ScoringSettings):
    """A run as passed to the planner, presets applied; "auto" and None are resolved when planning.

    Attributes:
        chunk_length: in bp; None embeds whole sequences.
        esm_model: None embeds DNA only.
        dnabert_model: None embeds proteins only.
        frames: what is embedded of a chunk; None: what the head was trained for.
        switches: emergency switches (VIRNUC_DISABLE_FP16, ...), which win over the rest; None takes those of the process
            that makes the plan.
    """

    chunk_length: ChunkLength | Literal["auto"] | None = "auto"
    esm_model: str | None = "tiny"
    dnabert_model: str | None = "tiny"
    frames: FrameRule | None = None
    switches: tuple[str, ...] | None = None


class TrainerSettings(Settings):
    """How a head is fitted to vectors."""

    seed: CountFromZero = _setting(0, "Random seed")
    held_out: Annotated[FiniteFloat, Field(gt=0, lt=0.5)] = _setting(
        0.1, "Fraction of the groups of each class held out for validation, and again for the test"
    )
    group_power: Annotated[FiniteFloat, Field(ge=0, le=1)] = _setting(
        0.6, "Sample groups in proportion to their size to this power"
    )
    most_frames: Count = _setting(200_000, "Approximate maximum number of frames")
    epochs: Count = _setting(20, "Maximum number of epochs")

    @property
    def fit(self) -> dict[str, float]:
        """These settings alone, also of a `TrainSettings`."""
        return {name: getattr(self, name) for name in TrainerSettings.model_fields}


class TrainSettings(TrainerSettings, TwoModelSettings):
    """Settings of `train`: the models to embed with, and how the head is fitted."""

    chunk_length: ChunkLength = _setting(500, "Chunk length in bp to train the head for")
    esm_model: str = _model_setting("tiny", "esm2")
    dnabert_model: str = _model_setting("tiny", "dnabert_s")
    frames: FrameRule = _setting(
        "longest",
        "longest: embed the longest ORFs of each chunk; open: its frames without a stop codon, as VirNucPro does",
    )
    groups: str | None = _setting(
        None,
        "Table with columns seq_name and group; a group is never split between training and test",
        "none",
    )


class FramesSettings(Settings):
    """Settings of `frames`."""

    chunk_length: ChunkLength = _setting(..., "Chunk length in bp")


class LaneSettings(Settings):
    """Where lanes run, and in a pool how much work each gets."""

    mode: LaneMode = _setting("local", "local: on this host; pool: by the workers of a Prefect work pool")
    lane_minutes: PositiveTime = _setting(10.0, "Estimated minutes of work per lane in a pool")
    priority: Priority = _setting("normal", "Queue of the lanes in a pool")


def in_words(field: FieldInfo) -> str:
    """The default of a setting as help and docs show it; empty if it must be given."""
    if field.is_required():
        return ""
    if words := next((each for each in field.metadata if isinstance(each, InWords)), ""):
        return words
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return ",".join(field.default) if isinstance(field.default, tuple) else str(field.default)


# Defaults of flows, which their signatures show.
EMBED_DEFAULTS: Final = EmbedSettings.model_construct()
LANE_DEFAULTS: Final = LaneSettings.model_construct()
PREDICT_DEFAULTS: Final = PredictSettings.model_construct()
TRAIN_DEFAULTS: Final = TrainSettings.model_construct()


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
    return f"invalid settings: {listed}."


def predict_config(settings: PredictSettings) -> RunConfig:
    """The run of `predict`: given settings override the preset."""
    presets: dict[Preset, dict[str, Any]] = {
        "tiny": {},
        "virnucpro-500": {"chunk_length": 500, "esm_model": "3B", "dnabert_model": "DNABERT-S"},
        "virnucpro-300": {"chunk_length": 300, "esm_model": "3B", "dnabert_model": "DNABERT-S"},
    }
    given = {name: value for name, value in settings.given.items() if name != "preset"}
    return RunConfig(**{**presets[settings.preset], **given})


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
