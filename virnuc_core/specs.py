"""What a model is and what a run was asked to do: frozen, torch-free descriptions."""

from dataclasses import dataclass
from typing import Final, Literal

Family = Literal["esm2", "dnabert_s"]
MODEL_IN_WORDS: Final[dict[Family, str]] = {"esm2": "an ESM-2 model", "dnabert_s": "a DNABERT-S model"}
ResolvedPrecision = Literal["fp32", "fp16", "bf16", "fp8"]
Precision = Literal["auto", "fp32", "fp16", "bf16", "fp8"]
Engine = Literal["packed", "reference"]
AttentionBackend = Literal["triton", "flash-attn", "varlen", "sdpa", "padded", "reference"]
AttentionChoice = Literal["auto", "triton", "flash-attn", "varlen", "sdpa", "reference"]
ResolvedCompileMode = Literal["none", "default", "reduce-overhead", "max-autotune"]
CompileMode = Literal["auto", "none", "default", "reduce-overhead", "max-autotune"]
EmbeddingsDtype = Literal["none", "float16", "float32"]
Alphabet = Literal["dna", "protein"]
Preset = Literal["tiny", "virnucpro-300", "virnucpro-500"]
# Of what there is a row to be embedded: each open frame; also each chunk without one, whose DNA alone is there; or of
# these chunks only.
Rows = Literal["open_frames", "all_chunks", "closed_chunks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The architecture of one transformer, as read from its checkpoint.

    Attributes:
        family: which of the two architectures this is.
        num_layers: transformer layers; a `repr_layer` is valid in 0..num_layers.
        embedding_dim: width D of the hidden states.
        num_heads: attention heads N; head_dim is D / N.
        ffn_dim: width of the feed-forward layer (of each gated half for DNABERT-S).
        vocab_size: rows of the token embedding.
        layer_norm_eps: epsilon of every LayerNorm.
        token_dropout: ESM-2 only: embeddings are rescaled for masked tokens at inference too.
    """

    family: Family
    num_layers: int
    embedding_dim: int
    num_heads: int
    ffn_dim: int
    vocab_size: int
    layer_norm_eps: float
    token_dropout: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embedding_dim // self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run's settings as asked for; "auto" and None are resolved when the plan is made.

    Attributes:
        chunk_length: chunk length K in bp; None when whole sequences are embedded.
        esm_model: catalogue name, hub name or path of the protein model; None for a DNA-only run.
        dnabert_model: the same for the DNA model; None for a protein-only run.
        head: path of the classifier head; None takes the bundled head of the bundled models, or, when
            `chunk_length` is None, no head.
        dna_head: path of the head that scores chunks without an open frame by their DNA vector alone, "auto" for the
            bundled one of the bundled models; None leaves them without a score.
        repr_layer: layer of the ESM-2 representation (of the single model when only one is run),
            0..num_layers; None is the last.
        precision: arithmetic of the forward pass.
        dnabert_precision: the same for the DNA model; None is as `precision`.
        devices: "auto", "cpu", or CUDA device indices.
        token_budget: most tokens in one packed batch; None lets the engine choose.
        engine: "packed", or "reference" (one sequence at a time, fp32, plain attention).
        dnabert_engine: the same for the DNA model; None is as `engine`.
        attention: attention backend.
        compile_mode: how torch.compile treats the layers; "auto" compiles where the run is long enough.
        shard_seconds: estimated work in a shard, in seconds; None is by the kind of device.
        embeddings: dtype in which vectors are stored, or "none" to store scores only.
        switches: emergency switches of the environment (`VIRNUC_DISABLE_FP16`, ...), which win over the rest; None takes
            those of the process that makes the plan.
        min_length: records with fewer letters are not used.
        threshold: p_virus from which chunks and contigs are called virus, between 0 and 1.
    """

    chunk_length: int | None = 500
    esm_model: str | None = "tiny"
    dnabert_model: str | None = "tiny"
    head: str | None = None
    dna_head: str | None = None
    repr_layer: int | None = None
    precision: Precision = "auto"
    dnabert_precision: Precision | None = None
    devices: tuple[str, ...] = ("auto",)
    token_budget: int | None = None
    engine: Engine = "packed"
    dnabert_engine: Engine | None = None
    attention: AttentionChoice = "auto"
    compile_mode: CompileMode = "auto"
    shard_seconds: float | None = None
    embeddings: EmbeddingsDtype = "float32"
    switches: tuple[str, ...] | None = None
    min_length: int = 0
    threshold: float = 0.5

    @property
    def rows(self) -> Rows:
        """Of what chunks rows are needed: without a protein model, of those that have no open frame."""
        if self.dna_head is not None:
            return "all_chunks"
        is_dna_alone = self.chunk_length is not None and self.esm_model is None
        return "closed_chunks" if is_dna_alone else "open_frames"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """What identifies an input file: its bytes, not where it lies.

    Attributes:
        name: file name without folders.
        size: bytes as stored.
        sha256: hex digest of the bytes as stored.
    """

    name: str
    size: int
    sha256: str
