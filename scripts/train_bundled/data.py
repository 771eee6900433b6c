"""Chunks of genomes as tokens of both models: cut at several lengths, shifted, recoded or with sequencing errors."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scripts.train_bundled.genomes import Genomes
from scripts.train_bundled.recoding import recode
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.models.memory import to_device
from virnuc_core.sequences.frames import chunk_table, longest_orfs

Int64 = npt.NDArray[np.int64]

SPECIAL_TOKENS: Final = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
_GROUP_BASES: Final = 1 << 21


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One way of cutting all genomes: chunk length and first base, and how their letters are changed.

    Attributes:
        recoded: share of codons replaced by synonymous ones.
        substituted: mean share of residues replaced by similar ones.
        errors: share of bases read wrongly; a tenth as many are missing.
    """

    chunk_length: int
    shift: int = 0
    recoded: float = 0.0
    substituted: float = 0.0
    errors: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """C chunks with at least one row each, and their N rows, in the order of the genomes.

    Attributes:
        protein: tokens of N rows.
        dna: tokens of N rows.
        sizes: int32 (N, 2) residues of the row, bases of its chunk.
        first_row: int64 (C + 1,) first row of each chunk.
        record: int64 (C,) row of the chunk's genome.
    """

    protein: TokenColumn
    dna: TokenColumn
    sizes: npt.NDArray[np.int32]
    first_row: Int64
    record: Int64


def cut(genomes: Genomes, view: View, tokenizer: DnabertTokenizer, seed: int = 0) -> Chunks:
    """Cuts and tokenizes genomes; a plain view with shift 0 has the chunks of a prediction run."""
    rng = np.random.default_rng(seed)
    bases = with_errors(genomes.bases, view.errors, rng) if view.errors else genomes.bases
    begins = np.minimum(bases.offsets[:-1] + view.shift, bases.offsets[1:] - 1)
    table = chunk_table(bases.offsets[1:] - begins, view.chunk_length)
    starts, ends = begins[table.record] + table.start, begins[table.record] + table.end
    bounds = np.searchsorted(ends, np.arange(_GROUP_BASES, int(ends[-1]), _GROUP_BASES))
    protein, dna, sizes, counts, records = [], [], [], [], []
    for group in np.split(np.arange(len(ends)), np.unique(bounds)):
        if not len(group):
            continue
        left, right = int(starts[group].min()), int(ends[group].max())
        rows = longest_orfs(bases.data[left:right], starts[group] - left, ends[group] - left)
        column = (rows.dna, rows.protein)
        if view.recoded or view.substituted:
            column = recode(*column, view.recoded, view.substituted, rng)
        dna.append(tokenizer.encode(column[0]))
        protein.append(Esm2Tokenizer().encode(column[1]))
        chunks, count = np.unique(rows.chunk, return_counts=True)
        counts.append(count)
        records.append(table.record[group][chunks])
        lengths = (ends - starts)[group][rows.chunk]
        sizes.append(np.stack((rows.protein.lengths, lengths), axis=1).astype(np.int32))
    return Chunks(
        protein=_joined(protein),
        dna=_joined(dna),
        sizes=np.concatenate(sizes),
        first_row=np.concatenate(([0], np.cumsum(np.concatenate(counts)))),
        record=np.concatenate(records),
    )


def _joined(columns: list[TokenColumn]) -> TokenColumn:
    lengths = np.concatenate([column.num_tokens for column in columns])
    ids = np.concatenate([column.input_ids for column in columns])
    return TokenColumn(ids, np.concatenate(([0], np.cumsum(lengths))))


def with_errors(bases: ByteColumn, share: float, rng: np.random.Generator) -> ByteColumn:
    """Replaces this share of the bases by random ones and leaves out a tenth as many."""
    data = bases.data.copy()
    wrong = np.flatnonzero(rng.random(len(data), dtype=np.float32) < share)
    data[wrong] = np.frombuffer(b"ACGT", np.uint8)[rng.integers(0, 4, len(wrong))]
    kept = rng.random(len(data), dtype=np.float32) >= share / 10
    kept[bases.offsets[:-1]] = True
    before = np.concatenate(([0], np.cumsum(kept)))
    return ByteColumn(data[kept], before[bases.offsets])


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Tokens of N rows: ids int16 (T,) on the device, offsets int64 (N + 1,) on the host."""

    ids: Tensor
    offsets: Int64

    @classmethod
    def build(cls, tokens: TokenColumn, device: torch.device) -> Self:
        return cls(torch.from_numpy(tokens.input_ids.astype(np.int16)).to(device), tokens.offsets)

    def take(self, rows: Int64) -> tuple[Tensor, npt.NDArray[np.int32]]:
        """int64 ids (T,) of the given rows and their cu_seqlens (B + 1,)."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        shift, counts = to_device(np.stack([self.offsets[rows] - cu_seqlens[:-1], lengths]), self.ids.device)
        source = torch.repeat_interleave(shift, counts, output_size=int(cu_seqlens[-1]))
        source += torch.arange(len(source), device=source.device)
        return self.ids[source].long(), cu_seqlens.astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChunks:
    """The chunks of one view for training.

    Attributes:
        first_chunk: int64 (R + 1,) first chunk of each genome.
    """

    protein: DeviceTokens
    dna: DeviceTokens
    sizes: npt.NDArray[np.int32]
    first_row: Int64
    first_chunk: Int64

    @classmethod
    def build(cls, chunks: Chunks, num_records: int, device: torch.device) -> Self:
        return cls(
            protein=DeviceTokens.build(chunks.protein, device),
            dna=DeviceTokens.build(chunks.dna, device),
            sizes=chunks.sizes,
            first_row=chunks.first_row,
            first_chunk=np.searchsorted(chunks.record, np.arange(num_records + 1)),
        )


def save_chunks(chunks: Chunks, path: Path) -> None:
    arrays: dict[str, Any] = {
        "protein": chunks.protein.input_ids,
        "protein_offsets": chunks.protein.offsets,
        "dna": chunks.dna.input_ids,
        "dna_offsets": chunks.dna.offsets,
        "sizes": chunks.sizes,
        "first_row": chunks.first_row,
        "record": chunks.record,
    }
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    temporary.replace(path)
    gc.collect()


def load_chunks(path: Path) -> Chunks:
    with np.load(path) as arrays:
        return Chunks(
            protein=TokenColumn(arrays["protein"], arrays["protein_offsets"]),
            dna=TokenColumn(arrays["dna"], arrays["dna_offsets"]),
            sizes=arrays["sizes"],
            first_row=arrays["first_row"],
            record=arrays["record"],
        )
