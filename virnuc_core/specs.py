"""Shared types of a run: choices, model architecture, input identity."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

Family = Literal["esm2", "dnabert_s"]
FAMILY_NAMES: Final[dict[Family, str]] = {"dnabert_s": "DNABERT-S", "esm2": "ESM-2"}
MODEL_IN_WORDS: Final[dict[Family, str]] = {"esm2": "an ESM-2 model", "dnabert_s": "a DNABERT-S model"}
ResolvedPrecision = Literal["fp32", "fp16", "bf16", "fp8"]
Precision = Literal["auto", "fp32", "fp16", "bf16", "fp8"]
Engine = Literal["packed", "reference"]
AttentionBackend = Literal["triton", "flash-attn", "sdpa", "reference"]
AttentionChoice = Literal["auto", "triton", "flash-attn", "sdpa", "reference"]
ProductBackend = Literal["quack", "torch"]
EmbeddingsDtype = Literal["none", "float16", "float32"]
Alphabet = Literal["dna", "protein"]
Preset = Literal["tiny", "virnucpro-300", "virnucpro-500"]
# What is embedded of a chunk; see `virnuc_core.sequences.frames`.
FrameRule = Literal["open", "longest"]
FRAMES_IN_WORDS: Final[dict[FrameRule, str]] = {
    "open": "open reading frames",
    "longest": "longest ORFs",
}
# Confidence in a call.
Confidence = Literal["confident", "likely", "unsure"]
# What --chunk-length auto means for the longest ORFs: each record is cut by its own length, into chunks of 500 bp below
# 2,000 bp, and of 1,000 bp from there on.
ChunksByRecord = Literal["auto:500<2000,1000"]
CHUNKS_BY_RECORD: Final[ChunksByRecord] = "auto:500<2000,1000"
ChunkRule = int | ChunksByRecord
CODE_WIDTH: Final = 64  # of the row codes of a head for the longest ORFs
Size = Annotated[int, Field(gt=0, lt=1 << 31)]


def chunk_steps(rule: ChunkRule) -> tuple[tuple[int, int | None], ...]:
    """Chunk lengths in bp with the record length that each is used below, ascending; None ends the list."""
    return ((rule, None),) if isinstance(rule, int) else ((500, 2000), (1000, None))


def chunks_in_words(rule: ChunkRule | None) -> str:
    """The chunk length as texts state it; None is for whole sequences."""
    if rule is None:
        return "whole sequences"
    return ", else ".join(
        f"{size:,} bp" + (f" for sequences below {below:,} bp" if below else "")
        for size, below in chunk_steps(rule)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Architecture of a transformer, read from its checkpoint.

    Attributes:
        embedding_dim: hidden width.
        ffn_dim: width of the feed-forward layer (for DNABERT-S, of each gated half).
        token_dropout: ESM-2 only: embeddings are rescaled for masked tokens at inference too.
    """

    family: Family
    num_layers: Size
    embedding_dim: Size
    num_heads: Size
    ffn_dim: Size
    vocab_size: Size
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRule:
    """How contigs are called.

    With none of these, a calibrated head calls contigs that are probably viruses at the share of viruses that the sample has.

    Attributes:
        threshold: call by this `virus_score` and nothing else.
        fdr: most that the expected share of false calls may be.
        prior: share of viruses in the sample, which is estimated otherwise.
    """

    threshold: float | None = None
    fdr: float | None = None
    prior: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameKind:
    """What follows from what is embedded of a chunk, for runs and their files.

    Attributes:
        chunk_rule: how records are cut for a head that states no chunk length.
        is_calibrated: whether heads give probabilities of contigs that a false discovery rate can be promised from.
        takes_bf16: whether "auto" precision may be bf16 on the CPU; VirNucPro's frames are scored as VirNucPro does.
        missing: status of a chunk without a row.
        chunk_bases: shortest and longest chunk, in bp, that heads are made for; None where they do not say.
        row_datasets: further datasets of the embeddings file.
        head_datasets: further datasets of the embeddings file, by a head.
    """

    chunk_rule: ChunkRule
    is_calibrated: bool
    takes_bf16: bool
    missing: str
    chunk_bases: tuple[int, int] | None = None
    row_datasets: tuple[str, ...] = ()
    head_datasets: tuple[str, ...] = ()


FRAME_KINDS: Final[dict[FrameRule, FrameKind]] = {
    "open": FrameKind(chunk_rule=500, is_calibrated=False, takes_bf16=False, missing="no_open_frame"),
    "longest": FrameKind(
        chunk_rule=CHUNKS_BY_RECORD,
        is_calibrated=True,
        takes_bf16=True,
        missing="no_orf",
        chunk_bases=(200, 4000),
        row_datasets=("starts", "sizes"),
        head_datasets=("codes",),
    ),
}
