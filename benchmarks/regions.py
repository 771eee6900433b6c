"""How well viral regions are found: real bacterial windows with viral segments pasted in, through `virnuc predict`.

    python -m benchmarks.regions --fasta val.fa.gz --table genomes.tsv

The table has columns id and class. Segments are drawn at random, however they score. Precision, recall and F1 count bases.
"""

import random
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import dnaio

from benchmarks.reports import Json, command_of, options_of, print_and_write, read_rows
from virnuc_cli.main import main as virnuc
from virnuc_core.results.regions import DEFAULT_MODEL

SEED: Final = 6
NUM_SEGMENTS: Final = {5_000: 24, 10_000: 20, 20_000: 16}  # by their length in bp
NUM_WITHOUT: Final = 12
WINDOWS: Final = (30_000, 40_000)  # bp of bacterial sequence in a contig: minimum, maximum
LEAST_FLANK: Final = 5_000  # minimum bp of it on either side of a segment

# A called region: index of its contig, begin and end (0-based, half-open).
Called = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticContig:
    """A bacterial window, with a viral segment at bases `begin` to `end` (0-based, half-open) or none."""

    name: str
    sequence: str
    begin: int
    end: int

    @property
    def segment_length(self) -> int:
        return self.end - self.begin


def read_classes(path: Path) -> dict[str, str]:
    return {row["id"]: row["class"] for row in read_rows(path)}


def predict(inputs: Path | Mapping[str, str], folder: Path, chunk_length: str, *options: str) -> Path:
    """Runs `virnuc predict` with the bundled models on the CPU.

    Raises:
        SystemExit: it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fasta = inputs if isinstance(inputs, Path) else folder / "input.fa"
    if not isinstance(inputs, Path):
        fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in inputs.items()))
    command = ["predict", str(fasta), "--out", str(folder / "run"), "--chunk-length", chunk_length]
    if code := virnuc([*command, "--embeddings", "none", "--devices", "cpu", "--quiet", *options]):
        raise SystemExit(code)
    return folder / "run"


def cut_segments(
    viral: Mapping[str, str], generator: random.Random, most: Mapping[int, int]
) -> dict[int, dict[str, str]]:
    """Segments by length and name, `most` per length, from either strand of long enough genomes."""
    segments: dict[int, dict[str, str]] = {}
    for length, number in most.items():
        names = [name for name, sequence in viral.items() if len(sequence) >= length]
        segments[length] = {}
        for name in generator.sample(names, min(number, len(names))):
            begin = generator.randint(0, len(viral[name]) - length)
            piece, strand = viral[name][begin : begin + length], generator.choice("+-")
            if strand == "-":
                piece = piece[::-1].translate(str.maketrans("ACGT", "TGCA"))
            segments[length][f"{name}:{begin + 1}-{begin + length}{strand}"] = piece
    return segments


def paste(
    segments: Iterable[str],
    bacterial: Mapping[str, str],
    num_without: int,
    generator: random.Random,
    windows: tuple[int, int] = WINDOWS,
) -> list[SyntheticContig]:
    """One contig per segment, and `num_without` contigs without any.

    Each bacterial window is used once before one is reused.
    """
    pasted = [*segments, *[""] * num_without]
    names: list[str] = []
    while len(names) < len(pasted):
        names += generator.sample(list(bacterial), len(bacterial))
    contigs = []
    for number, (segment, window) in enumerate(zip(pasted, names, strict=False), 1):
        length = generator.randint(*windows)
        begin = generator.randint(0, max(0, len(bacterial[window]) - length))
        host = bacterial[window][begin : begin + length]
        place = generator.randint(LEAST_FLANK, len(host) - LEAST_FLANK)
        name, sequence = f"made_{number:03d}", host[:place] + segment + host[place:]
        contigs.append(SyntheticContig(name=name, sequence=sequence, begin=place, end=place + len(segment)))
    return contigs


def read_genomes(fasta: Path, classes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    genomes: dict[str, dict[str, str]] = {"viral": {}, "bacteria": {}}
    with dnaio.open(fasta) as records:
        for record in records:
            name = record.name.split()[0]
            if classes[name] in genomes:
                genomes[classes[name]][name] = record.sequence.upper()
    return genomes


def make_contigs(
    genomes: Mapping[str, Mapping[str, str]], windows: tuple[int, int] = WINDOWS
) -> list[SyntheticContig]:
    generator = random.Random(SEED)
    groups = cut_segments(genomes["viral"], generator, NUM_SEGMENTS).values()
    segments = [segment for group in groups for segment in group.values()]
    return paste(segments, genomes["bacteria"], NUM_WITHOUT, generator, windows)


def overlap(
    contigs: Sequence[SyntheticContig], regions: Iterable[Called], chosen: Collection[int] | None = None
) -> dict[str, float]:
    """Bases that are viral and called, only called, and only viral; precision, recall and F1; of the contigs `chosen` or all."""
    both = called = viral = 0
    for number, contig in enumerate(contigs):
        if chosen is None or number in chosen:
            viral += contig.segment_length
    for number, start, end in regions:
        if chosen is None or number in chosen:
            called += end - start
            both += max(0, min(end, contigs[number].end) - max(start, contigs[number].begin))
    return {
        "both": both,
        "called_only": called - both,
        "viral_only": viral - both,
        "precision": round(both / max(called, 1), 4),
        "recall": round(both / max(viral, 1), 4),
        "f1": round(2 * both / max(called + viral, 1), 4),
    }


def _shares(found: Mapping[str, float]) -> dict[str, float]:
    return {name: found[name] for name in ("precision", "recall", "f1")}


def measure(contigs: Sequence[SyntheticContig], run: Path) -> Json:
    """Compares the regions.tsv of a run with the truth."""
    numbers = {contig.name: number for number, contig in enumerate(contigs)}
    rows = read_rows(run / "regions.tsv")
    called = [(numbers[row["contig"]], int(row["start"]) - 1, int(row["end"])) for row in rows]
    of_length = {
        length: {number for number, contig in enumerate(contigs) if contig.segment_length == length}
        for length in (*NUM_SEGMENTS, 0)
    }
    without = of_length.pop(0)
    by_tier = {}
    for tier in ("confident", "likely", "unsure"):
        own = [region for region, row in zip(called, rows, strict=True) if row["tier"] == tier]
        by_tier[tier] = {"regions": len(own), "precision": overlap(contigs, own)["precision"]}
    return {
        **overlap(contigs, called),
        "regions": len(called),
        "by_length": {
            str(length): {"contigs": len(chosen), **_shares(overlap(contigs, called, chosen))}
            for length, chosen in of_length.items()
        },
        "by_tier": by_tier,
        "without_segment": {
            "contigs": len(without),
            "bases": sum(len(contigs[number].sequence) for number in without),
            "called": sum(end - start for number, start, end in called if number in without),
        },
    }


def main() -> None:
    parser = options_of("regions", __doc__)
    parser.add_argument("--fasta", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--windows", type=int, nargs=2, default=WINDOWS, help="bp of bacterial sequence")
    parser.add_argument("--chunk-length", default="auto")
    arguments = parser.parse_args()
    genomes = read_genomes(arguments.fasta, read_classes(arguments.table))
    contigs = make_contigs(genomes, tuple(arguments.windows))
    sequences = {contig.name: contig.sequence for contig in contigs}
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(contigs, predict(sequences, Path(scratch), arguments.chunk_length))
    report = {
        "command": command_of("regions"),
        "data": [arguments.fasta.name],
        "windows": list(arguments.windows),
        "chunk_length": arguments.chunk_length,
        "contigs": len(contigs),
        "bases": sum(map(len, sequences.values())),
        "model": asdict(DEFAULT_MODEL),
        **found,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
