"""How well viral regions are found: real bacterial windows with viral segments pasted in, through `virnuc predict`.

    python -m benchmarks.regions --fasta val.fa.gz --table genomes.tsv --out benchmarks/results/regions.json
    python -m benchmarks.regions --fasta train.fa.gz --table genomes.tsv --compare \
        --out benchmarks/results/regions_methods.json

The table has columns id and class. The segments are of viruses that score well alone: predicted by themselves, their
chunks have a mean p_virus of at least 0.5. Precision, recall and F1 count bases. With --compare, every method of
`benchmarks.region_methods` is measured with every setting on the same chunk scores; that is for the sequences that the
models were trained on, so that nothing is chosen by the figures that are reported.
"""

import argparse
import csv
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.made_regions import (
    SEGMENT_LENGTHS,
    MadeContig,
    cut_segments,
    paste,
    predict,
    predict_records,
    read_classes,
    read_genomes,
    that_score_well,
)
from benchmarks.region_methods import methods
from benchmarks.reports import print_and_write
from virnuc_core.results.regions import DEFAULT_MODEL, ChunkScores, find_regions
from virnuc_core.results.tables import DNA_ALONE_STATUS

SEED: Final = 6
NUM_SEGMENTS: Final = dict(zip(SEGMENT_LENGTHS, (24, 20, 16), strict=True))
NUM_WITHOUT: Final = 12
_P_BOUNDS: Final = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)

# A called region: its contig's number, its first base (0-based), and one past its last.
Called = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Bases that are viral and called so, only called so, and only viral."""

    both: int
    called_only: int
    viral_only: int

    @property
    def figures(self) -> dict[str, float]:
        """Precision, recall and F1; 0 where there is nothing to divide by."""
        called, viral = self.both + self.called_only, self.both + self.viral_only
        return {
            "precision": round(self.both / max(called, 1), 4),
            "recall": round(self.both / max(viral, 1), 4),
            "f1": round(2 * self.both / max(called + viral, 1), 4),
        }


def overlap(contigs: Sequence[MadeContig], regions: Iterable[Called]) -> Overlap:
    """Compares regions with the segments of contigs.

    Args:
        contigs: the truth.
        regions: what was called, with the contigs' places in that sequence.
    """
    both = called = 0
    for number, start, end in regions:
        contig = contigs[number]
        called += end - start
        both += max(0, min(end, contig.end) - max(start, contig.begin))
    viral = sum(contig.end - contig.begin for contig in contigs)
    return Overlap(both=both, called_only=called - both, viral_only=viral - both)


def make_contigs(fasta: Path, table: Path, scratch: Path, chunk_length: int) -> tuple[list[MadeContig], Any]:
    """Contigs with segments that score well alone, and how many candidates there were of each length."""
    generator = random.Random(SEED)
    viral, bacterial = read_genomes(fasta, table)
    candidates = cut_segments(viral, generator, {length: 2 * n for length, n in NUM_SEGMENTS.items()})
    everything = {segment.name: segment.sequence for group in candidates.values() for segment in group}
    run = predict_records(everything, scratch / "alone", chunk_length)
    good = {length: that_score_well(group, run) for length, group in candidates.items()}
    chosen = [segment for length, group in good.items() for segment in group[: NUM_SEGMENTS[length]]]
    counts = {
        str(length): {"candidates": len(candidates[length]), "score_well": len(group)}
        for length, group in good.items()
    }
    return paste(chosen, bacterial, NUM_WITHOUT, generator), counts


def measure(contigs: Sequence[MadeContig], run: Path) -> dict[str, Any]:
    """Compares the regions.tsv of a run with the truth."""
    numbers = {contig.name: number for number, contig in enumerate(contigs)}
    rows = read_rows(run / "regions.tsv")
    called = [(numbers[row["contig"]], int(row["start"]) - 1, int(row["end"])) for row in rows]
    by_length, by_tier = {}, {}
    for length in SEGMENT_LENGTHS:
        by_length[str(length)] = figures_of_length(contigs, called, length)
    for tier in ("confident", "likely", "unsure"):
        own = [region for region, row in zip(called, rows, strict=True) if row["tier"] == tier]
        found = overlap(contigs, own)
        by_tier[tier] = {"regions": len(own), "precision": found.figures["precision"]}
    without = {number for number, contig in enumerate(contigs) if contig.begin == contig.end}
    false = sum(end - start for number, start, end in called if number in without)
    bases = sum(len(contigs[number].sequence) for number in without)
    return {
        **asdict(overlap(contigs, called)),
        **overlap(contigs, called).figures,
        "regions": len(called),
        "by_length": by_length,
        "by_tier": by_tier,
        "without_segment": {"contigs": len(without), "bases": bases, "called": false},
    }


def figures_of_length(
    contigs: Sequence[MadeContig], called: Sequence[Called], length: int
) -> dict[str, float]:
    """The figures of the contigs with segments of one length."""
    chosen = [number for number, contig in enumerate(contigs) if contig.end - contig.begin == length]
    places = {number: place for place, number in enumerate(chosen)}
    own = [(places[number], start, end) for number, start, end in called if number in places]
    return {"contigs": len(chosen), **overlap([contigs[number] for number in chosen], own).figures}


def contig_tiers(classes: Mapping[str, str], run: Path) -> dict[str, dict[str, int]]:
    """How many of the labelled records of a run have each tier, and how many of those are called what they are."""
    rows = read_rows(run / "contigs.tsv")
    found = {}
    for tier in ("confident", "likely", "unsure", "NA"):
        own = [row for row in rows if row["tier"] == tier]
        right = sum((row["call"] == "virus") == (classes[row["contig"]] == "viral") for row in own)
        found[tier] = {"contigs": len(own), **({"right": right} if tier != "NA" else {})}
    return found


def compare(contigs: Sequence[MadeContig], run: Path) -> dict[str, Any]:
    """Measures every method with every setting on the chunk scores of a run, and what the scores themselves say."""
    chunks = read_chunks(contigs, run)
    found: dict[str, dict[str, Any]] = {}
    for name, settings in methods().items():
        f1 = {
            setting: overlap(contigs, [(r.contig, r.start, r.end) for r in method(chunks)]).figures
            for setting, method in settings.items()
        }
        best = sorted(f1, key=lambda setting: -f1[setting]["f1"])
        found[name] = {
            "settings": len(f1),
            "best": {setting: f1[setting] for setting in best[:3]},
            "median_f1": f1[best[len(best) // 2]]["f1"],
        }
    found["levels, posterior"]["chosen"] = overlap(
        contigs, [(r.contig, r.start, r.end) for r in find_regions(chunks)]
    ).figures
    return {"methods": found, "evidence": evidence(contigs, chunks)}


def evidence(contigs: Sequence[MadeContig], chunks: ChunkScores) -> list[dict[str, float]]:
    """How often viral and other chunks have a p_virus in each range, and the log of the ratio of the shares."""
    middle = (chunks.start + chunks.end) / 2
    begins, ends = (np.array([getattr(contig, name) for contig in contigs]) for name in ("begin", "end"))
    is_viral = (begins[chunks.contig] <= middle) & (middle < ends[chunks.contig])
    is_scored = ~np.isnan(chunks.p_virus)
    viral, other = (
        np.histogram(chunks.p_virus[is_scored & (is_viral == wanted)], _P_BOUNDS)[0]
        for wanted in (True, False)
    )
    ratio = np.log((viral + 0.5) / viral.sum()) - np.log((other + 0.5) / other.sum())
    rows = zip(_P_BOUNDS[:-1], _P_BOUNDS[1:], viral.tolist(), other.tolist(), ratio.tolist(), strict=True)
    return [
        {"from": low, "to": high, "viral": v, "other": o, "log_ratio": round(r, 2)}
        for low, high, v, o, r in rows
    ]


def read_chunks(contigs: Sequence[MadeContig], run: Path) -> ChunkScores:
    """The chunk scores of a run on made contigs."""
    numbers = {contig.name: number for number, contig in enumerate(contigs)}
    rows = read_rows(run / "predictions.tsv")
    return ChunkScores(
        contig=np.array([numbers[row["contig"]] for row in rows]),
        start=np.array([int(row["start"]) - 1 for row in rows]),
        end=np.array([int(row["end"]) for row in rows]),
        p_virus=np.array([float(row["p_virus"].replace("NA", "nan")) for row in rows]),
        is_dna_alone=np.array([row["status"] == DNA_ALONE_STATUS for row in rows]),
    )


def tracks(contigs: Sequence[MadeContig], run: Path) -> list[dict[str, Any]]:
    """The first contig with a segment of each length and the first one without: truth, scores and regions."""
    shown = []
    regions, chunks = read_rows(run / "regions.tsv"), read_rows(run / "predictions.tsv")
    for length in (*SEGMENT_LENGTHS, 0):
        contig = next(contig for contig in contigs if contig.end - contig.begin == length)
        scored = [row for row in chunks if row["contig"] == contig.name and row["p_virus"] != "NA"]
        own = [row for row in regions if row["contig"] == contig.name]
        shown.append(
            {
                "contig": contig.name,
                "length": len(contig.sequence),
                "segment": [contig.begin, contig.end],
                "middle": [(int(row["start"]) + int(row["end"])) // 2 for row in scored],
                "p_virus": [round(float(row["p_virus"]), 3) for row in scored],
                "regions": [[int(row["start"]) - 1, int(row["end"]), row["tier"]] for row in own],
            }
        )
    return shown


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("fasta", "table", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--chunk-length", type=int, default=500)
    parser.add_argument("--scratch", type=Path, help="keeps the runs, so that they are not computed again")
    parser.add_argument("--compare", action="store_true", help="measure other methods and settings, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = arguments.scratch or Path(temporary)
        contigs, candidates = make_contigs(arguments.fasta, arguments.table, scratch, arguments.chunk_length)
        run = predict_records(
            {contig.name: contig.sequence for contig in contigs}, scratch / "pasted", arguments.chunk_length
        )
        figures = measure(contigs, run)
        if arguments.compare:
            others = compare(contigs, run)
        else:
            whole = predict(arguments.fasta, scratch / "whole", arguments.chunk_length)
            others = {
                "contig_tiers": contig_tiers(read_classes(arguments.table), whole),
                "tracks": tracks(contigs, run),
            }
    names = f"--fasta {arguments.fasta.name} --table {arguments.table.name}"
    options = f"{names} --chunk-length {arguments.chunk_length}{' --compare' if arguments.compare else ''}"
    report = {
        "command": f"python -m benchmarks.regions {options} --out {arguments.out}",
        "data": arguments.fasta.name,
        "chunk_length": arguments.chunk_length,
        "contigs": len(contigs),
        "bases": sum(len(contig.sequence) for contig in contigs),
        "segments": candidates,
        "model": asdict(DEFAULT_MODEL),
        **figures,
        **others,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
