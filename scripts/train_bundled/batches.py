"""Tokenized frames on the device, sampled by weight."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scripts.train_bundled.dataset import Genomes, TokenizedFrames
from scripts.train_bundled.network import TinyPair, Tokens
from virnuc_core.batching.tokenizers import TokenColumn
from virnuc_core.models.encoder import Encoder
from virnuc_core.training.split import sample_weights


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """One model's tokens of F frames: input_ids (T,) on the device, offsets int64 (F + 1,) on the host."""

    input_ids: Tensor
    offsets: npt.NDArray[np.int64]

    @classmethod
    def build(cls, columns: list[TokenColumn], device: torch.device) -> Self:
        """Concatenates the columns."""
        ids = torch.from_numpy(np.concatenate([c.input_ids for c in columns]).astype(np.int16))
        lengths = np.concatenate([c.num_tokens for c in columns])
        return cls(ids.to(device), np.concatenate([[0], np.cumsum(lengths)]))

    def take(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, npt.NDArray[np.int32]]:
        """int64 ids (T,) of the given rows and their cu_seqlens (B + 1,)."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        moved = torch.from_numpy(np.stack([self.offsets[rows] - cu_seqlens[:-1], lengths]))
        shift, counts = moved.to(self.input_ids.device)
        total = int(cu_seqlens[-1])
        source = torch.repeat_interleave(shift, counts, output_size=total)
        source += torch.arange(total, device=source.device)
        return self.input_ids[source].long(), cu_seqlens.astype(np.int32)


@dataclass(frozen=True, slots=True)
class FrameSet:
    """F stop-free frames of chunks of one length, with labels.

    Attributes:
        labels: int64 (F,) 1 for virus, on the device.
        classes: int64 (F,) taxonomic class, on the device.
        chunk: int64 (F,) chunk of each frame; distinct between the parts it was built from.
        record: int64 (F,) genome of each frame.
        cumulative: float64 (F,) cumulative sampling weights, ending at 1.
        num_chunks: all chunks, including those without a stop-free frame.
    """

    chunk_length: int
    protein: DeviceTokens
    dna: DeviceTokens
    labels: Tensor
    classes: Tensor
    chunk: npt.NDArray[np.int64]
    record: npt.NDArray[np.int64]
    cumulative: npt.NDArray[np.float64]
    num_chunks: int

    @classmethod
    def build(
        cls, genomes: Genomes, parts: list[TokenizedFrames], group_power: float, device: torch.device
    ) -> Self:
        """Joins parts (the same genomes cut at different shifts) into one set."""
        record = np.concatenate([part.record for part in parts])
        starts = np.cumsum([0, *(part.num_chunks for part in parts)])
        weights = sample_weights(genomes.is_viral[record], genomes.groups[record], group_power)
        return cls(
            chunk_length=parts[0].chunk_length,
            protein=DeviceTokens.build([part.protein for part in parts], device),
            dna=DeviceTokens.build([part.dna for part in parts], device),
            labels=torch.from_numpy(genomes.is_viral[record].astype(np.int64)).to(device),
            classes=torch.from_numpy(genomes.classes[record]).to(device),
            chunk=np.concatenate([part.chunk + start for part, start in zip(parts, starts, strict=False)]),
            record=record,
            cumulative=np.cumsum(weights),
            num_chunks=int(starts[-1]),
        )

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Rows sampled by weight, with replacement."""
        rows = np.searchsorted(self.cumulative, rng.random(count), side="right")
        return np.minimum(rows, len(self.cumulative) - 1)

    def batch(self, rows: npt.NDArray[np.int64], model: TinyPair) -> tuple[Tokens, Tokens]:
        """The protein and the DNA batch of the given rows."""
        return (
            _tokens(*self.protein.take(rows), model.esm2),
            _tokens(*self.dna.take(rows), model.dnabert),
        )


def _tokens(input_ids: Tensor, cu_seqlens: npt.NDArray[np.int32], model: Encoder) -> Tokens:
    layout = model.build_layout(cu_seqlens, "sdpa")
    special = torch.zeros_like(input_ids, dtype=torch.bool)
    special[layout.cu_seqlens[:-1].long()] = True
    special[layout.cu_seqlens[1:].long() - 1] = True
    return Tokens(input_ids, layout, special)
