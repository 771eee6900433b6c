"""The two small models, the head, and their training-only parts: masked tokens and the loss.

Shape legend: N rows, C chunks and R contigs of a batch, T tokens, D width of a model, V vocabulary, K classes.
"""

import copy
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from scripts.train_bundled.data import SPECIAL_TOKENS, DeviceChunks, DeviceTokens
from scripts.train_bundled.genomes import CLASSES, NUM_VIRUS
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.models.attention import PackedLayout, position_ids, rotary_table, split_qkv
from virnuc_core.models.encoders import ESM2, DnabertS, Encoder, mean_pool
from virnuc_core.models.heads import ContigHead, HeadSpec
from virnuc_core.models.memory import to_device
from virnuc_core.specs import ModelSpec
from virnuc_core.training.contigs import ContigBatch, LossWeights, head_losses

Int64 = npt.NDArray[np.int64]

ESM2_SPEC: Final = ModelSpec(
    family="esm2",
    num_layers=3,
    embedding_dim=256,
    num_heads=4,
    ffn_dim=1024,
    vocab_size=33,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
DNABERT_SPEC: Final = ModelSpec(
    family="dnabert_s",
    num_layers=2,
    embedding_dim=256,
    num_heads=4,
    ffn_dim=512,
    vocab_size=4096,
    layer_norm_eps=1e-12,
)
_AMINO_ACID_IDS: Final = (4, 24)
_BPE_MASK_ID: Final = SPECIAL_TOKENS.index("[MASK]")
_BPE_IDS: Final = (len(SPECIAL_TOKENS), DNABERT_SPEC.vocab_size)


@dataclass(frozen=True, slots=True)
class PackedRotary:
    """Attention within packed sequences in one call, (T, 3, N, H) -> (T, N * H); torch's kernel knows no ALiBi."""

    cu_seqlens: Tensor
    longest: int
    table: Tensor

    def __call__(self, qkv: Tensor) -> Tensor:
        queries, keys, values = split_qkv(qkv, self.table)
        bounds, longest = self.cu_seqlens, self.longest
        attended = varlen_attn(queries, keys, values, bounds, bounds, longest, longest)
        assert isinstance(attended, Tensor)
        return attended.flatten(1)


def layout_of(cu_seqlens: npt.NDArray[np.int32], model: Encoder, device: torch.device) -> PackedLayout:
    if device.type == "cpu" or model.spec.family == "dnabert_s":
        return model.build_layout(cu_seqlens, "sdpa")
    bounds = to_device(cu_seqlens, device)
    table = rotary_table(model.spec.head_dim, position_ids(bounds, int(cu_seqlens[-1])))
    return PackedLayout(bounds, PackedRotary(bounds, int(np.diff(cu_seqlens).max()), table))


@dataclass(frozen=True, slots=True)
class Tokens:
    """A packed batch on the device, longest row first, so that its layout has few rectangles.

    Attributes:
        ids: int64 (T,).
        layout: of the rows.
        lengths: int64 (N,) of the rows, on the host.
        place: int64 (N,) where each of the asked rows is.
    """

    ids: Tensor
    layout: PackedLayout
    lengths: Int64
    place: Tensor

    @classmethod
    def take(cls, tokens: DeviceTokens, rows: Int64, model: Encoder) -> "Tokens":
        lengths = tokens.offsets[rows + 1] - tokens.offsets[rows]
        order = np.argsort(-lengths, kind="stable")
        ids, cu_seqlens = tokens.take(rows[order])
        layout = layout_of(cu_seqlens, model, ids.device)
        return cls(ids, layout, lengths[order], to_device(np.argsort(order), ids.device))

    def masked(
        self, mask_id: int, random_ids: tuple[int, int], rng: np.random.Generator
    ) -> tuple["Tokens", Tensor]:
        """Masks tokens of about half of the sequences, at a rate drawn for each one from 0.05..0.3.

        One in ten of the chosen tokens becomes a random token of the range `random_ids` instead of the mask, and one in
        ten stays.

        Returns:
            The corrupted batch, and the tokens to predict, int64 (n,).
        """
        ends = np.cumsum(self.lengths)
        rate = rng.uniform(0.05, 0.3, len(ends)) * (rng.random(len(ends)) < 0.5)
        is_chosen = rng.random(ends[-1], np.float32) < np.repeat(rate, self.lengths)
        is_chosen[ends - 1] = is_chosen[ends - self.lengths] = False  # special tokens
        chosen = np.flatnonzero(is_chosen)
        fate = rng.random(len(chosen))
        is_changed = (fate < 0.8) | (fate >= 0.9)
        noise = np.where(fate < 0.8, mask_id, rng.integers(*random_ids, len(chosen)))
        ids = self.ids.clone()
        ids[to_device(chosen[is_changed], ids.device)] = to_device(noise[is_changed], ids.device)
        return replace(self, ids=ids), to_device(chosen, ids.device)


class MaskedTokenHead(nn.Module):
    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Logits (T, V) of hidden (T, D) under embedding (V, D)."""
        logits: Tensor = functional.linear(self.transform(hidden), embedding, self.bias)
        return logits


class Network(nn.Module):
    """ESM-2, DNABERT-S, the head, and what only training needs."""

    def __init__(self, dropout: float, head_dropout: float, dna_dropout: float = 0.0) -> None:
        super().__init__()
        self._dna_dropout = dna_dropout
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

    def in_bf16(self) -> "Network":
        """A copy in bf16 with the same head, in fp32."""
        copied = copy.deepcopy(self).bfloat16()
        copied.head = self.head
        return copied

    def vectors(self, protein: Tokens, dna: Tokens) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Mean vectors of DNA and protein, fp32 (N, D), and their hidden states (T, D)."""
        hidden = self.dnabert(dna.ids, dna.layout), self.esm2(protein.ids, protein.layout)
        return (
            mean_pool(hidden[0], dna.layout.cu_seqlens, include_special_tokens=True)[dna.place],
            mean_pool(hidden[1], protein.layout.cu_seqlens, include_special_tokens=False)[protein.place],
        ), hidden

    def loss(
        self,
        chunks: DeviceChunks,
        batch: ContigBatch,
        weights: LossWeights,
        masked_weight: float,
        rng: np.random.Generator,
    ) -> dict[str, Tensor]:
        """The weighted parts of the loss of a batch; `masked_weight` is of the loss of masked tokens.

        Waits for nothing on the device, so that the host prepares a step while the device is at the one before.
        """
        device = self.head.gate.weight.device
        clean = (
            Tokens.take(chunks.dna, batch.rows, self.dnabert),
            Tokens.take(chunks.protein, batch.rows, self.esm2),
        )
        dna, masked_dna = clean[0].masked(_BPE_MASK_ID, _BPE_IDS, rng)
        protein, masked_protein = clean[1].masked(Esm2Tokenizer.mask_id, _AMINO_ACID_IDS, rng)
        vectors, hidden = self.vectors(protein, dna)
        # Whole contigs without their DNA, so that the protein has to be enough.
        has_dna = rng.random((len(batch.contig_class), 1)) >= self._dna_dropout
        vectors = vectors[0] * to_device(has_dna[batch.contig[batch.chunk]], device), vectors[1]
        sizes = to_device(chunks.sizes[batch.rows], device)
        parts = head_losses(self.head, self.head.row_codes(*vectors, sizes), batch, weights)
        masked = zip(
            (self.dnabert_mlm, self.esm2_mlm),
            (self.dnabert.word_embeddings.weight, self.esm2.embed_tokens.weight),
            clean,
            hidden,
            (masked_dna, masked_protein),
            strict=True,
        )
        losses = [
            functional.cross_entropy(head(states[chosen], embedding).float(), tokens.ids[chosen])
            for head, embedding, tokens, states, chosen in masked
        ]
        return {**parts, "masked": masked_weight * torch.stack(losses).sum()}
