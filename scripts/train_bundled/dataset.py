"""Labelled genomes -> tokenized stop-free frames, in memory, for training and evaluation."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from scripts.train_bundled.recoding import recode
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn, concatenated_ranges
from virnuc_core.sequences.frames import DNA_ALONE, chunk_table, open_frames, with_closed_chunks
from virnuc_core.sequences.reader import iter_records

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
    classes: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]

    @property
    def is_viral(self) -> npt.NDArray[np.bool_]:
        """Bool (R,)."""
        return np.asarray(self.classes == self.class_names.index(VIRAL))

    def take(self, rows: npt.NDArray[np.int64]) -> "Genomes":
        """Selects records."""
        return Genomes(
            bases=self.bases.take(rows),
            class_names=self.class_names,
            classes=self.classes[rows],
            groups=self.groups[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedFrames:
    """F stop-free frames of chunks of one length, tokenized for both models.

    Attributes:
        chunk_length: bp.
        record: int64 (F,) row of the genome.
        chunk: int64 (F,) number of the chunk, ascending.
        num_chunks: all chunks, including those without a stop-free frame.
    """

    chunk_length: int
    protein: TokenColumn
    dna: TokenColumn
    record: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.int64]
    num_chunks: int

    def take(self, rows: npt.NDArray[np.int64]) -> "TokenizedFrames":
        """Selects frames."""
        return replace(
            self,
            protein=_take_tokens(self.protein, rows),
            dna=_take_tokens(self.dna, rows),
            record=self.record[rows],
            chunk=self.chunk[rows],
        )


def _take_tokens(tokens: TokenColumn, rows: npt.NDArray[np.int64]) -> TokenColumn:
    index, offsets = concatenated_ranges(tokens.offsets[rows], tokens.num_tokens[rows])
    return TokenColumn(tokens.input_ids[index], offsets)


def load_genomes(fasta: Path, table: Path) -> Genomes:
    """Reads records and their labels.

    The table is tab-separated with columns id, class, family and organism, one row per record.
    """
    with table.open(newline="") as handle:
        labels = {row["id"]: row for row in csv.DictReader(handle, delimiter="\t")}
    names, sequences = [], []
    for record in iter_records([str(fasta)], "dna"):
        names.append(record.name)
        sequences.append(record.sequence)
    rows = [labels[name] for name in names]
    class_names = tuple(sorted({row["class"] for row in labels.values()}))
    kin = [f"{row['class']}:{row['family'] or _genus(row['organism'])}" for row in rows]
    return Genomes(
        bases=ByteColumn.from_strings(sequences),
        class_names=class_names,
        classes=np.array([class_names.index(row["class"]) for row in rows]),
        groups=np.unique(kin, return_inverse=True)[1],
    )


def _genus(organism: str) -> str:
    """First word of the organism's name that is not an accession number."""
    words = [word for word in organism.replace("|", " ").split() if not any(c.isdigit() for c in word)]
    return words[0] if words else organism


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
    record, starts, ends = _chunks(genomes, chunk_length, shift)
    frames = open_frames(genomes.bases.data, starts, ends)
    dna, protein = frames.dna, frames.protein
    if any(recoded):
        dna, protein = recode(dna, protein, *recoded, np.random.default_rng(shift))
    return TokenizedFrames(
        chunk_length=chunk_length,
        protein=Esm2Tokenizer().encode(protein),
        dna=tokenizer.encode(dna),
        record=record[frames.chunk],
        chunk=np.asarray(frames.chunk),
        num_chunks=len(record),
    )


def tokenized_closed_chunks(
    genomes: Genomes, chunk_length: int, tokenizer: DnabertTokenizer, shift: int = 0
) -> TokenizedFrames:
    """The chunks without a stop-free frame, as in a run with a DNA-only head; their proteins are empty."""
    record, starts, ends = _chunks(genomes, chunk_length, shift)
    frames = open_frames(genomes.bases.data, starts, ends)
    rows = with_closed_chunks(frames, genomes.bases.data, starts, ends)
    closed = rows.take(np.flatnonzero(rows.frame == DNA_ALONE))
    return TokenizedFrames(
        chunk_length=chunk_length,
        protein=Esm2Tokenizer().encode(closed.protein),
        dna=tokenizer.encode(closed.dna),
        record=record[closed.chunk],
        chunk=np.asarray(closed.chunk),
        num_chunks=len(record),
    )


def _chunks(genomes: Genomes, chunk_length: int, shift: int) -> tuple[Int64, Int64, Int64]:
    """Record, start and end of every chunk, starting `shift` bp into each record."""
    begins = np.minimum(genomes.bases.offsets[:-1] + shift, genomes.bases.offsets[1:] - 1)
    chunks = chunk_table(genomes.bases.offsets[1:] - begins, chunk_length)
    return chunks.record, begins[chunks.record] + chunks.start, begins[chunks.record] + chunks.end


def train_vocabulary(genomes: Genomes, size: int, path: Path, rng: np.random.Generator) -> None:
    """Trains a BPE vocabulary on both strands of balanced samples and writes `tokenizer.json`.

    Half of the sampled windows are viral, the rest is spread evenly over the other classes.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL_TOKENS, initial_alphabet=list("ACGT"), show_progress=False
    )
    tokenizer.train_from_iterator(_clean(_windows(genomes, rng, count=40_000, length=500)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(path))


def _windows(genomes: Genomes, rng: np.random.Generator, count: int, length: int) -> Iterator[str]:
    complement = bytes.maketrans(b"ACGT", b"TGCA")
    per_class = np.bincount(
        genomes.classes, weights=genomes.bases.lengths, minlength=len(genomes.class_names)
    )
    others = len(genomes.class_names) - 1
    share = np.where(np.array(genomes.class_names) == VIRAL, 0.5, 0.5 / others)
    weight = genomes.bases.lengths / per_class[genomes.classes] * share[genomes.classes]
    for row in rng.choice(len(weight), count, p=weight / weight.sum()):
        begin, end = genomes.bases.offsets[row : row + 2]
        start = rng.integers(begin, max(begin + 1, end - length))
        window = genomes.bases.data[start : min(end, start + length)].tobytes()
        yield (window if rng.random() < 0.5 else window.translate(complement)[::-1]).decode()


def _clean(windows: Iterable[str]) -> Iterator[str]:
    """Only windows of pure ACGT, so that no ambiguity code enters the vocabulary."""
    return (window for window in windows if not set(window) - set("ACGT"))
