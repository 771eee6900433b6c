"""Accuracy of the bundled models on labelled sequences, measured through `virnuc predict` itself.

    python -m benchmarks.val_auroc --fasta val.fa.gz
    python -m benchmarks.val_auroc --fasta far.fa.gz --out benchmarks/results/far_auroc.json

Headers hold `class=viral` or another class. Records are cut into chunks of two lengths, each of which counts by its own score,
and into contigs of four lengths. A score of at least 0.5 counts as called; a sequence without a score is not called, and ranks
below every score.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import dnaio
import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks.calls import predict
from benchmarks.reports import Json, command_of, options_of, print_and_write, read_rows
from virnuc_core.training.metrics import KnownCalls, measure

CHUNK_LENGTHS: Final = (300, 500)
CONTIG_LENGTHS: Final = (1000, 3000, 5000, 10000)
_CLASS: Final = re.compile(r"class=(\w+)")


def read_labelled(fasta: Path) -> dict[str, tuple[str, str]]:
    """Class and sequence of each record, by name.

    Raises:
        SystemExit: a record states no class.
    """
    records = {}
    with dnaio.open(fasta) as file:
        for record in file:
            name, _, rest = record.name.partition(" ")
            found = _CLASS.search(rest)
            if not found:
                raise SystemExit(f"{fasta}: {name} states no class= in its header")
            records[name] = found[1], record.sequence
    return records


def measure_scores(rows: list[dict[str, str]], classes: list[str]) -> Json:
    """Figures of rows with a score each, of these classes."""
    class_names, numbers = np.unique(classes, return_inverse=True)
    p_virus = np.array([float(row["virus_score"].replace("NA", "nan")) for row in rows])
    calls = KnownCalls(
        is_viral=np.array(classes) == "viral",
        p_virus=p_virus,
        classes=numbers,
        class_names=tuple(class_names.tolist()),
        lengths=np.zeros(len(rows), np.int64),
    )
    metrics = measure(calls)
    confusion = metrics.confusion
    return {
        "count": len(rows),
        "viral": int(calls.is_viral.sum()),
        "share_scored": round(float(calls.is_scored.mean()), 4),
        "auroc": round(float(roc_auc_score(calls.is_viral, np.nan_to_num(p_virus, nan=-1))), 4),
        "recall": round(confusion.viral_called_virus / int(calls.is_viral.sum()), 4),
        "false_positive_rate": round(confusion.other_called_virus / int((~calls.is_viral).sum()), 4),
        "precision": round(metrics.precision or 0.0, 4),
        "ece_balanced": metrics.ece_balanced,
        "by_class": {
            own.name: {"count": own.count, "called_virus": round(own.called_virus / own.count, 4)}
            for own in metrics.by_class
        },
    }


def measure_all(records: dict[str, tuple[str, str]], devices: str) -> Iterator[tuple[str, Json]]:
    """Figures by what is measured."""
    options = ("--devices", devices)
    sequences = {name: sequence for name, (_, sequence) in records.items()}
    for length in CHUNK_LENGTHS:
        with tempfile.TemporaryDirectory() as scratch:
            rows = read_rows(
                predict(sequences, Path(scratch), "--chunk-length", str(length), *options) / "chunks.tsv"
            )
        yield f"chunks of {length:,} bp", measure_scores(rows, [records[row["seq_name"]][0] for row in rows])
    contigs = {
        f"{length}:{start}:{name}": sequence[start : start + length]
        for length in CONTIG_LENGTHS
        for name, sequence in sequences.items()
        for start in range(0, len(sequence) - length + 1, length)
    }
    with tempfile.TemporaryDirectory() as scratch:
        rows = read_rows(predict(contigs, Path(scratch), *options) / "contigs.tsv")
    for length in CONTIG_LENGTHS:
        own = [row for row in rows if row["seq_name"].startswith(f"{length}:")]
        names = [row["seq_name"].split(":", 2)[2] for row in own]
        yield f"contigs of {length:,} bp", measure_scores(own, [records[name][0] for name in names])


def main() -> None:
    parser = options_of("val_auroc", __doc__)
    parser.add_argument("--fasta", type=Path, required=True)
    parser.add_argument("--devices", default="cpu", help="as of `virnuc predict`")
    arguments = parser.parse_args()
    figures = dict(measure_all(read_labelled(arguments.fasta), arguments.devices))
    what = {"command": command_of("val_auroc"), "data": arguments.fasta.name}
    print_and_write({**what, "sets": figures}, arguments.out)


if __name__ == "__main__":
    main()
