"""Labelled genomes -> BPE vocabulary, and tokenized stop-free frames, on the host and on the device."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import Tensor

from scripts.train_bundled.recoding import recode
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn, concatenated_ranges
from virnuc_core.sequences.frames import chunk_table, open_frames
from virnuc_core.sequences.reader import iter_records
from virnuc_core.training.split import sample_weights

Int64 = npt.NDArray[np.int64]

VIRAL = "viral"
SPECIAL_TOKENS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Genomes:
    """Labelled records.

    Attributes:
        bases: upper-case sequences of R records.
        class_names: the taxonomic classes, "viral" among them.
        classes: int64 (R,) index into class_names.
        groups: int64 (R,) related records share a group (family or genus, as far as known).
    """

    bases: ByteColumn
    class_names: tuple[str, ...]
    classes: Int64
    groups: Int64

    @classmethod
    def load(cls, fasta: Path, table: Path) -> Self:
        """Reads records and their labels.

        The table is tab-separated with columns id, class, family and organism, one row per record.
        """
        with table.open(newline="") as handle:
            labels = {row["id"]: row for row in csv.DictReader(handle, delimiter="\t")}
        records = list(iter_records([str(fasta)], "dna"))
        rows = [labels[record.name] for record in records]
        class_names = tuple(sorted({row["class"] for row in labels.values()}))
        kin = [f"{row['class']}:{row['family'] or _genus(row['organism'])}" for row in rows]
        return cls(
            bases=ByteColumn.from_strings([record.sequence for record in records]),
            class_names=class_names,
            classes=np.array([class_names.index(row["class"]) for row in rows]),
            groups=np.unique(kin, return_inverse=True)[1],
        )

    @property
    def is_viral(self) -> npt.NDArray[np.bool_]:
        """Bool (R,)."""
        return np.asarray(self.classes == self.class_names.index(VIRAL))

    def take(self, rows: Int64) -> "Genomes":
        """Selects records."""
        classes, groups = self.classes[rows], self.groups[rows]
        return Genomes(
            bases=self.bases.take(rows), class_names=self.class_names, classes=classes, groups=groups
        )


def _genus(organism: str) -> str:
    """First word of the organism's name that is not an accession number."""
    words = [word for word in organism.replace("|", " ").split() if not any(c.isdigit() for c in word)]
    return words[0] if words else organism


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedFrames:
    """F frames of chunks of one length, tokenized for both models.

    Attributes:
        record: int64 (F,) row of the genome.
        chunk: int64 (F,) number of the chunk, ascending.
        chunk_record: int64 (C,) row of the genome of every chunk, with or without a stop-free frame.
    """

    protein: TokenColumn
    dna: TokenColumn
    record: Int64
    chunk: Int64
    chunk_record: Int64

    def take(self, rows: Int64) -> "TokenizedFrames":
        """Selects frames."""
        return TokenizedFrames(
            protein=_take_tokens(self.protein, rows),
            dna=_take_tokens(self.dna, rows),
            record=self.record[rows],
            chunk=self.chunk[rows],
            chunk_record=self.chunk_record,
        )


def _take_tokens(tokens: TokenColumn, rows: Int64) -> TokenColumn:
    index, offsets = concatenated_ranges(tokens.offsets[rows], tokens.num_tokens[rows])
    return TokenColumn(tokens.input_ids[index], offsets)


def tokenized_frames(
    genomes: Genomes,
    chunk_length: int,
    tokenizer: DnabertTokenizer,
    shift: int = 0,
    recoded: tuple[float, float] = (0.0, 0.0),
) -> TokenizedFrames:
    """Chunks, translates and tokenizes every record, starting `shift` bp into it.

    With shift 0 the chunks are exactly those of a prediction run. `recoded` holds the shares of codons and
    residues that `recode` resamples.
    """
    begins = np.minimum(genomes.bases.offsets[:-1] + shift, genomes.bases.offsets[1:] - 1)
    chunks = chunk_table(genomes.bases.offsets[1:] - begins, chunk_length)
    starts, ends = begins[chunks.record] + chunks.start, begins[chunks.record] + chunks.end
    frames = open_frames(genomes.bases.data, starts, ends)
    dna, protein = frames.dna, frames.protein
    if any(recoded):
        dna, protein = recode(dna, protein, *recoded, np.random.default_rng(shift))
    return TokenizedFrames(
        protein=Esm2Tokenizer().encode(protein),
        dna=tokenizer.encode(dna),
        record=chunks.record[frames.chunk],
        chunk=np.asarray(frames.chunk),
        chunk_record=chunks.record,
    )


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """One model's tokens of F frames: input_ids (T,) on the device, offsets int64 (F + 1,) on the host."""

    input_ids: Tensor
    offsets: Int64

    @classmethod
    def build(cls, columns: Sequence[TokenColumn], device: torch.device) -> Self:
        """Concatenates the columns."""
        ids = torch.from_numpy(np.concatenate([c.input_ids for c in columns]).astype(np.int16))
        lengths = np.concatenate([c.num_tokens for c in columns])
        return cls(ids.to(device), np.concatenate([[0], np.cumsum(lengths)]))

    def take(self, rows: Int64) -> tuple[Tensor, npt.NDArray[np.int32]]:
        """int64 ids (T,) of the given rows and their cu_seqlens (B + 1,)."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        moved = torch.from_numpy(np.stack([self.offsets[rows] - cu_seqlens[:-1], lengths]))
        shift, counts = moved.to(self.input_ids.device)
        source = torch.repeat_interleave(shift, counts, output_size=int(cu_seqlens[-1]))
        source += torch.arange(len(source), device=source.device)
        return self.input_ids[source].long(), cu_seqlens.astype(np.int32)


@dataclass(frozen=True, slots=True)
class FrameSet:
    """F stop-free frames of chunks of one length, with labels.

    Attributes:
        labels: int64 (F,) 1 for virus, on the device.
        classes: int64 (F,) taxonomic class, on the device.
        cumulative: float64 (F,) cumulative sampling weights, ending at 1.
    """

    chunk_length: int
    protein: DeviceTokens
    dna: DeviceTokens
    labels: Tensor
    classes: Tensor
    cumulative: npt.NDArray[np.float64]

    @classmethod
    def build(
        cls,
        genomes: Genomes,
        chunk_length: int,
        parts: Sequence[TokenizedFrames],
        group_power: float,
        device: torch.device,
    ) -> Self:
        """Joins parts (the same genomes cut at different shifts) into one set."""
        record = np.concatenate([part.record for part in parts])
        is_viral = genomes.is_viral[record]
        return cls(
            chunk_length=chunk_length,
            protein=DeviceTokens.build([part.protein for part in parts], device),
            dna=DeviceTokens.build([part.dna for part in parts], device),
            labels=torch.from_numpy(is_viral.astype(np.int64)).to(device),
            classes=torch.from_numpy(genomes.classes[record]).to(device),
            cumulative=np.cumsum(sample_weights(is_viral, genomes.groups[record], group_power)),
        )

    def draw(self, count: int, rng: np.random.Generator) -> Int64:
        """Rows sampled by weight, with replacement."""
        rows = np.searchsorted(self.cumulative, rng.random(count), side="right")
        return np.minimum(rows, len(self.cumulative) - 1)


def train_vocabulary(genomes: Genomes, size: int, path: Path, rng: np.random.Generator) -> None:
    """Trains a BPE vocabulary on both strands of balanced samples and writes `tokenizer.json`.

    Half of the sampled windows are viral, the rest is spread evenly over the other classes.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL_TOKENS, initial_alphabet=list("ACGT"), show_progress=False
    )
    tokenizer.train_from_iterator(_windows(genomes, rng, count=40_000, length=500), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(path))


def _windows(genomes: Genomes, rng: np.random.Generator, count: int, length: int) -> Iterator[str]:
    """Only windows of pure ACGT, so that no ambiguity code enters the vocabulary."""
    complement = bytes.maketrans(b"ACGT", b"TGCA")
    lengths, num_classes = genomes.bases.lengths, len(genomes.class_names)
    per_class = np.bincount(genomes.classes, weights=lengths, minlength=num_classes)
    share = np.where(np.array(genomes.class_names) == VIRAL, 0.5, 0.5 / (num_classes - 1))
    weight = lengths / per_class[genomes.classes] * share[genomes.classes]
    for row in rng.choice(len(weight), count, p=weight / weight.sum()):
        begin, end = genomes.bases.offsets[row : row + 2]
        start = rng.integers(begin, max(begin + 1, end - length))
        window = genomes.bases.data[start : min(end, start + length)].tobytes()
        window = window if rng.random() < 0.5 else window.translate(complement)[::-1]
        if not set(window) - set(b"ACGT"):
            yield window.decode()
