"""Accuracy of the bundled models on labelled genomes, measured through `virnuc predict` itself.

    python -m benchmarks.val_auroc --fasta val.fa.gz --table genomes.tsv --out benchmarks/results/val_auroc.json

The table is tab-separated with columns id and class ("viral" or any other). A chunk counts when it has an
open frame; the share of chunks that do is given beside the figures.
"""

import argparse
import csv
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

from benchmarks.reports import print_and_write
from flows.cli import main as virnuc

CHUNK_LENGTHS = (500, 300)


def measure(fasta: Path, classes: dict[str, str], chunk_length: int) -> dict[str, object]:
    """Predicts `fasta` in a temporary folder and compares the calls of its chunks with the labels."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["predict", str(fasta), "--out", folder, "--chunk-length", str(chunk_length), "--quiet"]
        code = virnuc([*command, "--embeddings", "none"])
        if code:
            raise SystemExit(code)
        with (Path(folder) / "predictions.tsv").open(newline="") as handle:
            rows = list(csv.DictReader(handle, delimiter="\t"))
    scored = [row for row in rows if row["status"] == "scored"]
    names = np.array([classes[row["contig"]] for row in scored])
    viral, p_virus = names == "viral", np.array([float(row["p_virus"]) for row in scored])
    called = np.array([row["call"] == "virus" for row in scored])
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[classes[row["contig"]]] += 1
    return {
        "chunks": len(rows),
        "share_with_open_frame": round(len(scored) / len(rows), 4),
        "auroc": round(float(roc_auc_score(viral, p_virus)), 4),
        "average_precision": round(float(average_precision_score(viral, p_virus)), 4),
        "accuracy": round(float((called == viral).mean()), 4),
        "by_class": {
            name: {
                "chunks": totals[name],
                "scored": int((names == name).sum()),
                "called_virus": round(float(called[names == name].mean()), 4),
            }
            for name in sorted(totals)
            if (names == name).any()
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("fasta", "table", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    with arguments.table.open(newline="") as handle:
        classes = {row["id"]: row["class"] for row in csv.DictReader(handle, delimiter="\t")}
    results = {str(k): measure(arguments.fasta, classes, k) for k in CHUNK_LENGTHS}
    names = f"--fasta {arguments.fasta.name} --table {arguments.table.name}"
    command = f"python -m benchmarks.val_auroc {names} --out {arguments.out}"
    report = {"command": command, "data": arguments.fasta.name, "chunk_length": results}
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
