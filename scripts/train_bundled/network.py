"""The two small models and their training-only parts: heads, masking and loss.

Shape legend: B frames in a batch, T tokens, D width of a model, V vocabulary.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.train_bundled.data import DeviceTokens
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.models.dnabert_s import DnabertS
from virnuc_core.models.encoder import Encoder, mean_pool
from virnuc_core.models.esm2 import ESM2
from virnuc_core.specs import ModelSpec

ESM2_SPEC = ModelSpec(
    family="esm2",
    num_layers=5,
    embedding_dim=256,
    num_heads=8,
    ffn_dim=1024,
    vocab_size=33,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
DNABERT_SPEC = ModelSpec(
    family="dnabert_s",
    num_layers=4,
    embedding_dim=256,
    num_heads=8,
    ffn_dim=512,
    vocab_size=4096,
    layer_norm_eps=1e-12,
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A packed batch on the device: input_ids (T,), its layout, and which tokens are special (T,)."""

    input_ids: Tensor
    layout: PackedLayout
    special: Tensor

    @classmethod
    def take(cls, tokens: DeviceTokens, rows: npt.NDArray[np.int64], model: Encoder) -> "Tokens":
        """The batch of the given rows."""
        input_ids, cu_seqlens = tokens.take(rows)
        layout = model.build_layout(cu_seqlens, "sdpa")
        special = torch.zeros_like(input_ids, dtype=torch.bool)
        special[layout.cu_seqlens[:-1].long()] = True
        special[layout.cu_seqlens[1:].long() - 1] = True
        return cls(input_ids, layout, special)

    def masked(self, mask_id: int, random_ids: tuple[int, int]) -> tuple["Tokens", Tensor]:
        """Masks tokens of about three in four sequences, at a rate sampled for each one from 0.05..0.3.

        One in ten of the chosen tokens becomes a random token of the range `random_ids` instead of the
        mask, and one in ten stays.

        Returns:
            The corrupted batch, and bool (T,) marking the tokens to predict.
        """
        lengths, device = self.layout.cu_seqlens.diff(), self.input_ids.device
        rate = torch.empty(len(lengths), device=device).uniform_(0.05, 0.3)
        rate *= torch.rand(len(lengths), device=device) < 0.75
        rate = torch.repeat_interleave(rate, lengths, output_size=len(self.input_ids))
        chosen = (torch.rand_like(rate) < rate) & ~self.special
        fate = torch.rand_like(rate)
        noise = torch.randint(*random_ids, self.input_ids.shape, device=device, dtype=self.input_ids.dtype)
        ids = self.input_ids.masked_fill(chosen & (fate < 0.8), mask_id)
        return replace(self, input_ids=torch.where(chosen & (fate >= 0.9), noise, ids)), chosen


class MaskedTokenHead(nn.Module):
    """Predicts masked tokens through the transposed token embedding."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Logits (T, V) of hidden (T, D) under embedding (V, D)."""
        logits: Tensor = F.linear(self.transform(hidden), embedding, self.bias)
        return logits


class TinyPair(nn.Module):
    """ESM-2, DNABERT-S and one classifier per chunk length, with the auxiliary heads for training."""

    def __init__(self, chunk_lengths: tuple[int, ...], num_classes: int, dropout: float) -> None:
        super().__init__()
        self.esm2 = ESM2(ESM2_SPEC, dropout=dropout)
        self.dnabert = DnabertS(DNABERT_SPEC, dropout=dropout)
        width = ESM2_SPEC.embedding_dim + DNABERT_SPEC.embedding_dim
        self.heads = nn.ModuleDict({str(k): MLPClassifier(width) for k in chunk_lengths})
        self.class_head = nn.Linear(width, num_classes)
        self.esm2_mlm = MaskedTokenHead(ESM2_SPEC.embedding_dim, ESM2_SPEC.vocab_size)
        self.dnabert_mlm = MaskedTokenHead(DNABERT_SPEC.embedding_dim, DNABERT_SPEC.vocab_size)

    def features(self, protein: Tokens, dna: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Pooled features (B, D_dna + D_protein) and the hidden states of protein (T, D) and DNA (T, D)."""
        h_protein = self.esm2(protein.input_ids, protein.layout)
        h_dna = self.dnabert(dna.input_ids, dna.layout)
        pooled = [
            mean_pool(h_dna, dna.layout.cu_seqlens, include_special_tokens=True),
            mean_pool(h_protein, protein.layout.cu_seqlens, include_special_tokens=False),
        ]
        return torch.cat(pooled, 1), h_protein, h_dna

    def head(self, chunk_length: int) -> MLPClassifier:
        """The classifier of one chunk length: its logits (B, 2) are before the softmax."""
        head = self.heads[str(chunk_length)]
        assert isinstance(head, MLPClassifier)
        return head

    def masked_token_loss(
        self, clean: tuple[Tokens, Tokens], hidden: tuple[Tensor, Tensor], chosen: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Mean cross-entropy of the masked tokens, protein plus DNA."""
        embeddings = (self.esm2.embed_tokens.weight, self.dnabert.word_embeddings.weight)
        parts = zip((self.esm2_mlm, self.dnabert_mlm), embeddings, clean, hidden, chosen, strict=True)
        losses = [
            F.cross_entropy(head(states[where], embedding).float(), tokens.input_ids[where].long())
            for head, embedding, tokens, states, where in parts
        ]
        return torch.stack(losses).sum()
