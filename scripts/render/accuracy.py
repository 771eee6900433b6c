"""Tables of the accuracy of the bundled models, for README, model card and science: chunks, contigs, classes, tiers, promises."""

from collections.abc import Iterator
from functools import partial
from typing import Final

from scripts.render.tables import Json, MakeTable, Results, table

_CHUNKS: Final = "val_auroc"
_CONTIGS: Final = "contig_calls"
_table: Final = partial(
    table,
    missing=f"Not measured yet: `python -m benchmarks.{_CHUNKS}` and `python -m benchmarks.{_CONTIGS}` measure it.",
)


def _measured(results: Results) -> Iterator[tuple[str, Json]]:
    """Chunks and contigs of each length, the shortest first."""
    for file, key, words in ((_CHUNKS, "chunk_length", "chunks"), (_CONTIGS, "length", "contigs")):
        groups = results[file][key] if file in results else {}
        for length in sorted(groups, key=int):
            yield f"{words} of {int(length):,} bp", groups[length]


def _contigs(results: Results) -> Iterator[tuple[str, Json]]:
    return ((kind, group) for kind, group in _measured(results) if "contigs" in group)


def summary_rows(results: Results) -> Iterator[Json]:
    """One row a length; all of the sequences, but for the calibration error."""
    for kind, group in _measured(results):
        count = group["contigs"] if "contigs" in group else group["chunks"]
        yield {"kind": kind, "count": count, **group, **group["everything"]}


def class_rows(results: Results) -> Iterator[Json]:
    """One row a class, with the share called virus at each length."""
    groups = [group["by_class"] for _, group in _measured(results)]
    for name in sorted({name for group in groups for name in group}):
        shares = [group[name]["called_virus"] if name in group else None for group in groups]
        cells = ["" if share is None else f"{share:.1%}" for share in shares]
        yield {"name": name, "cells": " | ".join(cells)}


def _class_table(results: Results) -> str:
    """Its columns are the lengths that were measured."""
    kinds = "|".join(kind for kind, _ in _measured(results))
    return _table(f"class|{kinds}", "{name}|{cells}", class_rows)(results)


def contig_rows(results: Results) -> Iterator[Json]:
    """Class and novelty of contigs."""
    for kind, group in _contigs(results):
        yield {"kind": kind, **group, **group["novelty"]}


def tier_rows(results: Results) -> Iterator[Json]:
    """How often calls of each tier are right."""
    for kind, group in _contigs(results):
        for tier in group["by_tier"].values():
            yield {
                "kind": kind,
                **tier,
                "share": tier["right"] / tier["contigs"] if tier["contigs"] else None,
            }


def promise_rows(results: Results) -> Iterator[Json]:
    """The worst observed rate of any size of sample, for each length, promise and share of viruses."""
    for kind, group in _contigs(results):
        for promised in sorted({row["promised"] for row in group["fdr"]}):
            rows = [row for row in group["fdr"] if row["promised"] == promised]
            shares = sorted({row["share"] for row in rows})
            worst = [max(row["fdr"] for row in rows if row["share"] == share) for share in shares]
            yield {"kind": kind, "promised": promised, "cells": " | ".join(f"{rate:.1%}" for rate in worst)}


SUMMARY: Final[dict[str, MakeTable]] = {
    "summary": _table(
        "validation set|number|with a score|AUROC|recall|false positives|precision|calibration error",
        "{kind}|{count:,}|{share_scored:.1%}|{auroc:.3f}|{recall:.1%}|{false_positive_rate:.1%}|{precision:.1%}"
        "|{ece_balanced:.3f}",
        summary_rows,
    )
}
TIERS: Final[dict[str, MakeTable]] = {
    "contig-tiers": _table(
        "contigs|tier|number|called right|called virus|of these viral",
        "{kind}|`{tier}`|{contigs:,}|{share:.1%}|{called_virus:,}|{precision:.1%}",
        tier_rows,
    )
}
MODEL_CARD: Final[dict[str, MakeTable]] = {
    **SUMMARY,
    **TIERS,
    "classes": _class_table,
    "contigs": _table(
        "contigs|class is right|called wrongly|errors of the 80 % least novel, over all",
        "{kind}|{class_right:.1%}|{errors:.1%}|{errors_least_novel_over_all:.2f}",
        contig_rows,
    ),
    "promises": _table(
        "contigs|promised|0.5 % viruses|2 %|10 %|50 %", "{kind}|{promised:.0%}|{cells}", promise_rows
    ),
}
