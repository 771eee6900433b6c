"""Accuracy of the bundled models on labelled genomes, measured through `virnuc predict` itself.

    python -m benchmarks.val_auroc --fasta val.fa.gz --table genomes.tsv --out benchmarks/results/val_auroc.json

The table is tab-separated with columns id and class ("viral" or any other). Figures are given for the chunks
with a stop-free reading frame; end to end, over all chunks, where one without a score counts as not called and
ranks below every score; and for the chunks without such a frame, scored by their DNA alone.
"""

import argparse
import csv
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

from benchmarks.reports import print_and_write
from virnuc_cli.main import main as virnuc
from virnuc_core.results.tables import DNA_ALONE_STATUS
from virnuc_core.training.metrics import calibration_error

CHUNK_LENGTHS = (500, 300)


def measure(fasta: Path, classes: dict[str, str], chunk_length: int) -> dict[str, object]:
    """Predicts `fasta` in a temporary folder and compares the calls of its chunks with the labels."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["predict", str(fasta), "--out", folder, "--chunk-length", str(chunk_length), "--quiet"]
        code = virnuc([*command, "--embeddings", "none", "--dna-head", "auto"])
        if code:
            raise SystemExit(code)
        with (Path(folder) / "predictions.tsv").open(newline="") as handle:
            rows = list(csv.DictReader(handle, delimiter="\t"))
    scored, dna_alone = (
        [row for row in rows if row["status"] == status] for status in ("scored", DNA_ALONE_STATUS)
    )
    totals = Counter(classes[row["contig"]] for row in rows)
    return {
        "chunks": len(rows),
        "share_with_open_frame": round(len(scored) / len(rows), 4),
        **figures(scored, classes, totals),
        "all_chunks": end_to_end_figures(scored, classes, totals),
        "dna_alone": figures(dna_alone, classes, totals),
    }


def figures(
    rows: list[dict[str, str]], classes: dict[str, str], totals: Mapping[str, int]
) -> dict[str, object]:
    """Metrics of scored chunks; `totals` counts all chunks of each class."""
    names = np.array([classes[row["contig"]] for row in rows])
    is_viral, p_virus = names == "viral", np.array([float(row["p_virus"]) for row in rows])
    called = np.array([row["call"] == "virus" for row in rows])
    # Class-balanced, as in the calibration of the scores.
    weights = np.where(is_viral, 0.5 / is_viral.sum(), 0.5 / (~is_viral).sum())
    return {
        "auroc": round(float(roc_auc_score(is_viral, p_virus)), 4),
        "average_precision": round(float(average_precision_score(is_viral, p_virus)), 4),
        "accuracy": round(float((called == is_viral).mean()), 4),
        "ece_balanced": calibration_error(p_virus, is_viral, weights),
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


def end_to_end_figures(
    scored: list[dict[str, str]], classes: dict[str, str], totals: Mapping[str, int]
) -> dict[str, float]:
    """Metrics over all chunks: those without a score count as not called.

    Returns:
        Share of viral chunks called virus (recall), share of the others called virus, share of calls that are right
        (precision), and AUROC with unscored chunks below every score.
    """
    is_viral = np.array([classes[row["contig"]] == "viral" for row in scored])
    p_virus = np.array([float(row["p_virus"]) for row in scored])
    called = np.array([row["call"] == "virus" for row in scored])
    num_viral = totals["viral"]
    num_other = sum(totals.values()) - num_viral
    unscored = np.repeat([True, False], [num_viral - is_viral.sum(), num_other - (~is_viral).sum()])
    labels = np.concatenate((is_viral, unscored))
    ranks = np.concatenate((p_virus, np.full(len(unscored), -1.0)))
    right = int((called & is_viral).sum())
    return {
        "recall": round(right / num_viral, 4),
        "false_positive_rate": round(int((called & ~is_viral).sum()) / num_other, 4),
        "precision": round(right / int(called.sum()), 4),
        "auroc": round(float(roc_auc_score(labels, ranks)), 4),
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
