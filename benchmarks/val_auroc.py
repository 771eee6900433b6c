"""Accuracy of the bundled models for chunks of labelled genomes, measured through `virnuc predict` itself.

    python -m benchmarks.val_auroc --fasta val.fa.gz --table genomes.tsv

The table is tab-separated with columns id and class ("viral" or any other). Metrics are given for the chunks with a score;
and over all chunks, where one without a score counts as not called and ranks below every score. `benchmarks.contig_calls`
measures whole contigs.
"""

import tempfile
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks.calls import predict
from benchmarks.reports import Json, command_of, options_of, print_and_write, read_rows
from virnuc_core.training.metrics import KnownCalls, measure

CHUNK_LENGTHS = (500, 300)


def measure_chunks(rows: list[dict[str, str]], class_of: dict[str, str]) -> Json:
    names = [class_of[row["seq_name"]] for row in rows]
    class_names, classes = np.unique(names, return_inverse=True)
    is_scored = np.array([row["status"] == "scored" for row in rows])
    calls = KnownCalls(
        is_viral=np.array(names) == "viral",
        p_virus=np.array([float(row["virus_score"].replace("NA", "nan")) for row in rows]),
        classes=classes,
        class_names=tuple(class_names.tolist()),
        lengths=np.zeros(len(rows), np.int64),
    )
    return {"chunks": len(rows), "share_scored": round(float(is_scored.mean()), 4), **metrics_of(calls)}


def metrics_of(calls: KnownCalls) -> Json:
    """Metrics of the sequences with a score, and of all of them, of which one without a score is not called and ranks last."""
    metrics = measure(calls)
    confusion = metrics.confusion
    names = {"auroc": "auroc", "average_precision": "auprc", "accuracy": "accuracy"}
    return {
        **{name: round(getattr(metrics, key), 4) for name, key in names.items()},
        "ece_balanced": metrics.ece_balanced,
        "by_class": {
            own.name: {
                "count": own.count,
                "scored": own.scored,
                "called_virus": round(own.called_virus / own.count, 4),
            }
            for own in metrics.by_class
        },
        "everything": {
            "recall": round(confusion.viral_called_virus / int(calls.is_viral.sum()), 4),
            "false_positive_rate": round(confusion.other_called_virus / int((~calls.is_viral).sum()), 4),
            "precision": round(metrics.precision or 0.0, 4),
            "auroc": round(float(roc_auc_score(calls.is_viral, np.nan_to_num(calls.p_virus, nan=-1))), 4),
        },
    }


def main() -> None:
    parser = options_of("val_auroc", __doc__)
    for name in ("fasta", "table"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    classes, results = {row["id"]: row["class"] for row in read_rows(arguments.table)}, {}
    for chunk_length in CHUNK_LENGTHS:
        with tempfile.TemporaryDirectory() as scratch:
            run = predict(arguments.fasta, Path(scratch), "--chunk-length", str(chunk_length))
            rows = read_rows(run / "chunks.tsv")
        results[str(chunk_length)] = measure_chunks(rows, classes)
    what = {"command": command_of("val_auroc"), "data": arguments.fasta.name}
    print_and_write({**what, "chunk_length": results}, arguments.out)


if __name__ == "__main__":
    main()
