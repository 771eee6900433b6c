"""The two small models, the head, and their training-only parts: masked tokens and the loss.

Shape legend: N rows, C chunks and R contigs of a batch, T tokens, D width of a model, V vocabulary, K classes.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.train_bundled.data import SPECIAL_TOKENS, DeviceChunks, DeviceTokens
from scripts.train_bundled.genomes import ANY_VIRUS, CLASSES, NUM_VIRUS
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.columns import concatenated_ranges
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.contig_head import ContigHead, HeadSpec
from virnuc_core.models.dnabert_s import DnabertS
from virnuc_core.models.encoder import Encoder, mean_pool
from virnuc_core.models.esm2 import ESM2
from virnuc_core.specs import ModelSpec

Int64 = npt.NDArray[np.int64]

ESM2_SPEC: Final = ModelSpec(
    family="esm2",
    num_layers=4,
    embedding_dim=256,
    num_heads=8,
    ffn_dim=1024,
    vocab_size=33,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
DNABERT_SPEC: Final = ModelSpec(
    family="dnabert_s",
    num_layers=3,
    embedding_dim=256,
    num_heads=8,
    ffn_dim=512,
    vocab_size=4096,
    layer_norm_eps=1e-12,
)
_AMINO_ACID_IDS: Final = (4, 24)
_BPE_MASK_ID: Final = SPECIAL_TOKENS.index("[MASK]")
_BPE_IDS: Final = (len(SPECIAL_TOKENS), DNABERT_SPEC.vocab_size)
_NO_CONTIG: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """R contigs of one view: rows of the view's chunks, and their labels.

    Attributes:
        rows: int64 (N,) rows of the view.
        chunk: int64 (N,) chunk of each row.
        contig: int64 (C,) contig of each chunk.
        chunk_class: int64 (C,) class, or ANY_VIRUS.
        contig_class: int64 (R,) class, ANY_VIRUS, or -1 for a contig that joins a virus and another genome.
        contig_group: int64 (R,) group of relatives, or -1.
    """

    rows: Int64
    chunk: Int64
    contig: Int64
    chunk_class: Int64
    contig_class: Int64
    contig_group: Int64


def make_batch(
    chunks: DeviceChunks, parts: list[list[tuple[int, int]]], classes: Int64, groups: Int64
) -> Batch:
    """A batch of contigs, each of one or more runs of chunks (first, end) of a genome; classes and groups are by chunk."""
    runs = np.array([run for contig in parts for run in contig])
    contig_of_run = np.repeat(np.arange(len(parts)), [len(contig) for contig in parts])
    lengths = runs[:, 1] - runs[:, 0]
    chosen, _ = concatenated_ranges(runs[:, 0], lengths)
    contig = np.repeat(contig_of_run, lengths)
    first, counts = chunks.first_row[chosen], chunks.first_row[chosen + 1] - chunks.first_row[chosen]
    rows, _ = concatenated_ranges(first, counts)
    chunk_class = classes[chosen]
    is_single = np.array([len(contig) == 1 for contig in parts])
    first_chunk = np.searchsorted(contig, np.arange(len(parts)))
    return Batch(
        rows=rows,
        chunk=np.repeat(np.arange(len(chosen)), counts),
        contig=contig,
        chunk_class=chunk_class,
        contig_class=np.where(is_single, chunk_class[first_chunk], _NO_CONTIG),
        contig_group=np.where(is_single, groups[chosen[first_chunk]], _NO_CONTIG),
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """A packed batch on the device: ids (T,), its layout, and which tokens are special (T,)."""

    ids: Tensor
    layout: PackedLayout
    special: Tensor

    @classmethod
    def take(cls, tokens: DeviceTokens, rows: Int64, model: Encoder) -> "Tokens":
        """The batch of the given rows."""
        ids, cu_seqlens = tokens.take(rows)
        layout = model.build_layout(cu_seqlens, "sdpa")
        special = torch.zeros_like(ids, dtype=torch.bool)
        special[layout.cu_seqlens[:-1].long()] = True
        special[layout.cu_seqlens[1:].long() - 1] = True
        return cls(ids, layout, special)

    def masked(self, mask_id: int, random_ids: tuple[int, int]) -> tuple["Tokens", Tensor]:
        """Masks tokens of about half of the sequences, at a rate drawn for each one from 0.05..0.3.

        One in ten of the chosen tokens becomes a random token of the range `random_ids` instead of the mask, and one in
        ten stays.

        Returns:
            The corrupted batch, and bool (T,) marking the tokens to predict.
        """
        lengths, device = self.layout.cu_seqlens.diff(), self.ids.device
        rate = torch.empty(len(lengths), device=device).uniform_(0.05, 0.3)
        rate *= torch.rand(len(lengths), device=device) < 0.5
        rate = torch.repeat_interleave(rate, lengths, output_size=len(self.ids))
        chosen = (torch.rand_like(rate) < rate) & ~self.special
        fate = torch.rand_like(rate)
        noise = torch.randint(*random_ids, self.ids.shape, device=device, dtype=self.ids.dtype)
        ids = self.ids.masked_fill(chosen & (fate < 0.8), mask_id)
        return replace(self, ids=torch.where(chosen & (fate >= 0.9), noise, ids)), chosen


class MaskedTokenHead(nn.Module):
    """Predicts masked tokens through the transposed token embedding."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Logits (T, V) of hidden (T, D) under embedding (V, D)."""
        logits: Tensor = functional.linear(self.transform(hidden), embedding, self.bias)
        return logits


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """Weights of the parts of the loss."""

    row: float = 0.2
    chunk: float = 1.0
    context: float = 0.5
    contig: float = 1.0
    classes: float = 0.4
    relatives: float = 0.05
    masked: float = 0.3
    smoothing: float = 0.05


class Network(nn.Module):
    """ESM-2, DNABERT-S, the head, and what only training needs."""

    def __init__(self, dropout: float, head_dropout: float) -> None:
        super().__init__()
        self.esm2 = ESM2(ESM2_SPEC, dropout=dropout)
        self.dnabert = DnabertS(DNABERT_SPEC, dropout=dropout)
        spec = HeadSpec(
            dna_width=DNABERT_SPEC.embedding_dim,
            protein_width=ESM2_SPEC.embedding_dim,
            classes=CLASSES,
            num_virus=NUM_VIRUS,
        )
        self.head = ContigHead(spec, dropout=head_dropout)
        self.esm2_mlm = MaskedTokenHead(ESM2_SPEC.embedding_dim, ESM2_SPEC.vocab_size)
        self.dnabert_mlm = MaskedTokenHead(DNABERT_SPEC.embedding_dim, DNABERT_SPEC.vocab_size)

    def vectors(self, protein: Tokens, dna: Tokens) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Mean vectors of DNA and protein (N, D), and their hidden states (T, D)."""
        hidden = self.dnabert(dna.ids, dna.layout), self.esm2(protein.ids, protein.layout)
        return (
            mean_pool(hidden[0], dna.layout.cu_seqlens, include_special_tokens=True),
            mean_pool(hidden[1], protein.layout.cu_seqlens, include_special_tokens=False),
        ), hidden

    def loss(self, chunks: DeviceChunks, batch: Batch, weights: LossWeights) -> dict[str, Tensor]:
        """The weighted parts of the loss of a batch."""
        device = self.head.gate.weight.device
        clean = (
            Tokens.take(chunks.dna, batch.rows, self.dnabert),
            Tokens.take(chunks.protein, batch.rows, self.esm2),
        )
        dna, masked_dna = clean[0].masked(_BPE_MASK_ID, _BPE_IDS)
        protein, masked_protein = clean[1].masked(Esm2Tokenizer.mask_id, _AMINO_ACID_IDS)
        vectors, hidden = self.vectors(protein, dna)
        chunk, contig, chunk_class, contig_class, contig_group = (
            torch.from_numpy(part).to(device, non_blocking=True)
            for part in (batch.chunk, batch.contig, batch.chunk_class, batch.contig_class, batch.contig_group)
        )
        sizes = torch.from_numpy(chunks.sizes[batch.rows]).to(device)
        codes = self.head.row_codes(*vectors, sizes)
        pooled = self.head.chunk_codes(codes, chunk, len(batch.contig))
        contigs = self.head.contigs(pooled, contig, len(batch.contig_class))
        is_whole = contig_class != _NO_CONTIG
        parts = {
            "row": weights.row * self._class_loss(self.head.chunk(codes), chunk_class[chunk], weights),
            "chunk": weights.chunk * self._class_loss(self.head.chunk(pooled), chunk_class, weights),
            "context": weights.context * self._class_loss(contigs.context, chunk_class, weights),
            "contig": weights.contig
            * self._class_loss(contigs.logits[is_whole], contig_class[is_whole], weights),
            "relatives": weights.relatives
            * _relatives_loss(contigs.embedding[is_whole], contig_group[is_whole]),
        }
        masked = zip(
            (self.dnabert_mlm, self.esm2_mlm),
            (self.dnabert.word_embeddings.weight, self.esm2.embed_tokens.weight),
            clean,
            hidden,
            (masked_dna, masked_protein),
            strict=True,
        )
        losses = [
            functional.cross_entropy(head(states[where], embedding).float(), tokens.ids[where])
            for head, embedding, tokens, states, where in masked
        ]
        parts["masked"] = weights.masked * torch.stack(losses).sum()
        return parts

    def _class_loss(self, logits: Tensor, classes: Tensor, weights: LossWeights) -> Tensor:
        """Binary cross-entropy of virus or not, and cross-entropy of the class where it is known."""
        is_viral = (classes < NUM_VIRUS) | (classes == ANY_VIRUS)
        target = is_viral.float() * (1 - weights.smoothing) + weights.smoothing / 2
        binary = functional.binary_cross_entropy_with_logits(self.head.virus_margin(logits), target)
        known = functional.cross_entropy(
            logits.float(), classes, ignore_index=ANY_VIRUS, label_smoothing=weights.smoothing
        )
        return binary + weights.classes * known


def _relatives_loss(embedding: Tensor, group: Tensor) -> Tensor:
    """Supervised contrastive loss: contigs of a group are to be near each other, and far from others."""
    similarity = embedding @ embedding.T / 0.1
    itself = torch.eye(len(group), dtype=torch.bool, device=group.device)
    logits = similarity.masked_fill(itself, -1e4)
    log_share = logits - logits.logsumexp(1, keepdim=True)
    is_relative = (group[:, None] == group[None]) & ~itself
    counts = is_relative.sum(1)
    each = -(log_share * is_relative).sum(1) / counts.clamp(min=1)
    return each.sum() / (counts > 0).sum().clamp(min=1)
