"""Contigs with viral regions at known places: real bacterial windows into which segments of real viruses are pasted."""

import csv
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import dnaio

from virnuc_cli.main import main as virnuc

SEGMENT_LENGTHS: Final = (5_000, 10_000, 20_000)
WINDOW_LENGTHS: Final = (30_000, 40_000)  # bp of bacterial sequence in a contig: at least, at most
LEAST_FLANK: Final = 5_000  # bp of it on either side of a segment
SCORES_WELL: Final = 0.5  # least mean p_virus of a segment that is predicted alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of a viral genome.

    Attributes:
        name: of the record, with the bases that were taken, from 1, and the strand.
        record: of the genome.
        sequence: its bases.
    """

    name: str
    record: str
    sequence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeContig:
    """A bacterial window, with a viral segment in it or none.

    Attributes:
        name: of the contig.
        sequence: its bases.
        begin: first base of the segment, 0-based.
        end: one past its last base; equal to `begin` when there is none.
        segment: name of the segment, "" for none.
        window: name of the bacterial record.
    """

    name: str
    sequence: str
    begin: int
    end: int
    segment: str
    window: str


def read_classes(table: Path) -> dict[str, str]:
    """The class of each record."""
    with table.open(newline="") as handle:
        return {row["id"]: row["class"] for row in csv.DictReader(handle, delimiter="\t")}


def read_genomes(fasta: Path, table: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The viral genomes and the bacterial windows of a labelled FASTA file, by name."""
    classes = read_classes(table)
    viral: dict[str, str] = {}
    bacterial: dict[str, str] = {}
    with dnaio.open(fasta) as records:
        for record in records:
            name = record.name.split()[0]
            if classes[name] in ("viral", "bacteria"):
                chosen = viral if classes[name] == "viral" else bacterial
                chosen[name] = record.sequence.upper()
    return viral, bacterial


def cut_segments(
    viral: Mapping[str, str], generator: random.Random, most: Mapping[int, int]
) -> dict[int, list[Segment]]:
    """Candidates by length: one of each length from every genome that is long enough, in random order.

    Args:
        viral: genomes by name.
        generator: decides place, strand and order.
        most: candidates, by their length.
    """
    candidates: dict[int, list[Segment]] = {}
    for length, number in most.items():
        names = [name for name, sequence in viral.items() if len(sequence) >= length]
        chosen = generator.sample(names, min(number, len(names)))
        candidates[length] = [_cut(name, viral[name], length, generator) for name in chosen]
    return candidates


def _cut(record: str, sequence: str, length: int, generator: random.Random) -> Segment:
    begin = generator.randint(0, len(sequence) - length)
    piece, strand = sequence[begin : begin + length], generator.choice("+-")
    if strand == "-":
        piece = piece[::-1].translate(str.maketrans("ACGT", "TGCA"))
    return Segment(name=f"{record}:{begin + 1}-{begin + length}{strand}", record=record, sequence=piece)


def paste(
    segments: Iterable[Segment], bacterial: Mapping[str, str], num_without: int, generator: random.Random
) -> list[MadeContig]:
    """One contig for each segment, and some without any.

    Args:
        segments: what to paste.
        bacterial: windows by name; each is used once before one is used again.
        num_without: contigs without a segment.
        generator: decides windows, lengths and places.
    """
    pasted = [*segments, *[None] * num_without]
    names: list[str] = []
    while len(names) < len(pasted):
        names += generator.sample(list(bacterial), len(bacterial))
    contigs = []
    for number, (segment, window) in enumerate(zip(pasted, names, strict=False), 1):
        length = generator.randint(*WINDOW_LENGTHS)
        begin = generator.randint(0, max(0, len(bacterial[window]) - length))
        host = bacterial[window][begin : begin + length]
        place = generator.randint(LEAST_FLANK, len(host) - LEAST_FLANK)
        inside = segment.sequence if segment else ""
        contigs.append(
            MadeContig(
                name=f"made_{number:03d}",
                sequence=host[:place] + inside + host[place:],
                begin=place,
                end=place + len(inside),
                segment=segment.name if segment else "",
                window=window,
            )
        )
    return contigs


def predict_records(records: Mapping[str, str], folder: Path, chunk_length: int) -> Path:
    """Runs `virnuc predict` on sequences by name; a folder that holds this run already is used again."""
    folder.mkdir(parents=True, exist_ok=True)
    fasta = folder / "input.fa"
    fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records.items()))
    return predict(fasta, folder / "run", chunk_length)


def predict(fasta: Path, run: Path, chunk_length: int) -> Path:
    """Runs `virnuc predict` with the bundled models on the CPU, and gives the folder of the run.

    Raises:
        SystemExit: it failed.
    """
    command = ["predict", str(fasta), "--out", str(run), "--chunk-length", str(chunk_length)]
    code = virnuc([*command, "--embeddings", "none", "--devices", "cpu", "--quiet"])
    if code:
        raise SystemExit(code)
    return run


def that_score_well(segments: Sequence[Segment], run: Path) -> list[Segment]:
    """Those whose chunks have a mean p_virus of at least SCORES_WELL in a run on them alone."""
    with (run / "contigs.tsv").open(newline="") as handle:
        mean_p = {row["contig"]: row["mean_p"] for row in csv.DictReader(handle, delimiter="\t")}
    return [
        segment
        for segment in segments
        if mean_p[segment.name] != "NA" and float(mean_p[segment.name]) >= SCORES_WELL
    ]
