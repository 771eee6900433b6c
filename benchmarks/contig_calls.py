"""Calls of contigs by the bundled models: genomes cut into contigs of several lengths, through `virnuc predict` itself.

    python -m benchmarks.contig_calls --fasta val.fa.gz --table genomes.tsv

Records have class= in their headers, and the table columns id, class, family and organism. For each length: share of contigs
with a score; AUROC, precision and recall, over contigs with a score and over all; calibration error; errors by novelty; how
often calls of each tier, probability and class of organism are right; and what became of promised false discovery rates in samples
drawn from the contigs. A shorter rest of a genome is left out.
"""

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.regions import predict, read_rows
from benchmarks.reports import Json, command_of, options_of, print_and_write
from benchmarks.val_auroc import metrics_of
from scripts.train_bundled.evaluation import errors_by_novelty, fdr_rates, pieces
from scripts.train_bundled.genomes import ANY_VIRUS, CLASSES, Genomes
from virnuc_core.results.fdr import DEFAULT_GUARD
from virnuc_core.training.metrics import KnownCalls

LENGTHS: Final = (1_000, 3_000, 5_000, 10_000)
TIERS: Final = ("confident", "likely", "unsure")

_PROBABILITIES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

# Arrays of the columns of contigs.tsv, one value a contig.
Columns = dict[str, np.ndarray[Any, Any]]
Mask = np.ndarray[Any, Any]


def columns_of(rows: list[dict[str, str]]) -> Columns:
    """Text columns as they are, numbers as float64, NaN for NA."""
    texts = {name: np.array([row[name] for row in rows]) for name in ("call", "tier", "class")}
    numbers = {
        name: np.array([float(row[name].replace("NA", "nan")) for row in rows])
        for name in ("p_virus", "novelty")
    }
    return {**texts, **numbers}


def measure_contigs(found: Columns, genomes: Genomes) -> Json:
    """Metrics of contigs with these labels."""
    is_viral, is_called = genomes.is_viral, found["call"] == "virus"
    names, classes = np.unique(np.array(genomes.sources), return_inverse=True)
    calls = KnownCalls(
        is_viral=is_viral,
        is_called=is_called,
        p_virus=found["p_virus"],
        classes=classes,
        class_names=tuple(names.tolist()),
        lengths=genomes.bases.lengths,
    )
    is_known = genomes.classes != ANY_VIRUS
    named = np.array((*CLASSES, ""))[genomes.classes]
    rates = fdr_rates(found["p_virus"], is_viral, (DEFAULT_GUARD,))
    return {
        "contigs": len(is_viral),
        "viral": int(is_viral.sum()),
        "share_scored": round(float(calls.is_scored.mean()), 4),
        **metrics_of(calls),
        "class_right": round(float((found["class"] == named)[is_known].mean()), 4),
        "novelty": novelty_of(found, is_called != is_viral),
        "by_tier": {row["tier"]: row for row in tier_rows(found, is_viral)},
        "by_probability": list(probability_rows(found, is_viral)),
        "worst_fdr": {
            f"{promised:g}": max(row["fdr"] for row in rates if row["promised"] == promised)
            for promised in sorted({row["promised"] for row in rates})
        },
        "fdr": [{name: value for name, value in row.items() if name != "guard"} for row in rates],
    }


def novelty_of(found: Columns, is_wrong: Mask) -> Json:
    """Errors among contigs with a novelty, and among the least novel of them over that."""
    has_novelty = ~np.isnan(found["novelty"])
    ratio = errors_by_novelty(found["novelty"][has_novelty].astype(np.float32), is_wrong[has_novelty])
    return {
        "errors": round(float(is_wrong[has_novelty].mean()), 4),
        "errors_least_novel_over_all": None if np.isnan(ratio) else round(ratio, 3),
    }


def tier_rows(found: Columns, is_viral: Mask) -> Iterator[Json]:
    """How often calls of each tier are right."""
    for tier in TIERS:
        yield {"tier": tier, **rightness(found, is_viral, found["tier"] == tier)}


def probability_rows(found: Columns, is_viral: Mask) -> Iterator[Json]:
    """How often calls are right by their probability, which is that of not being a virus where `other` is called."""
    probability = np.maximum(found["p_virus"], 1 - found["p_virus"])
    for low, high in pairwise((*_PROBABILITIES, np.inf)):
        yield {"from": low, **rightness(found, is_viral, (probability >= low) & (probability < high))}


def rightness(found: Columns, is_viral: Mask, chosen: Mask) -> Json:
    """Right calls of the contigs `chosen`; precision is of those called virus, None without any."""
    is_called = found["call"] == "virus"
    called = chosen & is_called
    return {
        "contigs": int(chosen.sum()),
        "right": int((is_called == is_viral)[chosen].sum()),
        "called_virus": int(called.sum()),
        "precision": round(float(is_viral[called].mean()), 4) if called.any() else None,
    }


def main() -> None:
    """Command line."""
    parser = options_of("contig_calls", __doc__)
    for name in ("fasta", "table"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--chunk-length", default="auto")
    arguments = parser.parse_args()
    genomes, results = Genomes.load([arguments.fasta], arguments.table), {}
    for length in LENGTHS:
        contigs = pieces(genomes, length)
        sequences = {f"contig_{row}": text for row, text in enumerate(contigs.bases.to_strings())}
        with tempfile.TemporaryDirectory() as scratch:
            run = predict(sequences, Path(scratch), arguments.chunk_length)
            results[str(length)] = measure_contigs(columns_of(read_rows(run / "contigs.tsv")), contigs)
    what = {"command": command_of("contig_calls"), "data": arguments.fasta.name}
    report = {**what, "chunk_length": arguments.chunk_length, "length": results}
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
