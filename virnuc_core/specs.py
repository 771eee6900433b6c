"""Shared types of a run: choices, model architecture, input identity."""

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
# What is embedded of a chunk; see `virnuc_core.sequences.frames`.
FrameRule = Literal["open", "longest"]
FRAMES_IN_WORDS: Final[dict[FrameRule, str]] = {
    "open": "open reading frames",
    "longest": "longest stop-free stretches",
}
CODE_WIDTH: Final = 64  # of the row codes of a head for the longest stretches


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Architecture of a transformer, read from its checkpoint.

    Attributes:
        embedding_dim: hidden width.
        ffn_dim: width of the feed-forward layer (for DNABERT-S, of each gated half).
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
class InputFile:
    """Identity of an input file: name without folders, and size and hex SHA-256 of the bytes as stored."""

    name: str
    size: int
    sha256: str
