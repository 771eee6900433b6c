"""Metrics as Markdown, for evaluation pages and model cards."""

from tasks.pages.markdown import cell, table
from virnuc_core.training.metrics import Metrics

_NUMBERS = (
    ("AUROC", "auroc"),
    ("AUPRC (average precision)", "auprc"),
    ("F1", "f1"),
    ("precision", "precision"),
    ("recall", "recall"),
    ("accuracy", "accuracy"),
    ("expected calibration error", "ece"),
    ("the same, classes weighted alike", "ece_balanced"),
)


def figures_lines(levels: dict[str, Metrics], heading: str = "##") -> list[str]:
    """Tables of metrics by level, such as "chunks" and "contigs"; `heading` is the Markdown prefix of headings."""
    lines = [*overview_lines(levels), ""]
    for level, figures in levels.items():
        lines += [f"{heading} By class: {level}", "", *_by_class(figures), ""]
        lines += [f"{heading} By length of the record: {level}", "", *_by_length(figures), ""]
        lines += [f"{heading} Reliability: {level}", "", *_reliability(figures), ""]
    return lines


def number(value: float | None) -> str:
    """Three decimals, or a placeholder for a missing value."""
    return "n/a" if value is None else f"{value:.3f}"


def overview_lines(levels: dict[str, Metrics]) -> list[str]:
    """Only the scalar metrics of `figures_lines`."""
    rows = [
        ("sequences", *(f"{figures.count:,}" for figures in levels.values())),
        ("with a score", *(f"{figures.scored:,}" for figures in levels.values())),
        ("viral among them", *(f"{figures.viral:,}" for figures in levels.values())),
    ]
    rows += [
        (name, *(number(getattr(figures, key)) for figures in levels.values())) for name, key in _NUMBERS
    ]
    confusions = [figures.confusion for figures in levels.values()]
    rows += [
        ("viruses called virus", *(f"{one.viral_called_virus:,}" for one in confusions)),
        ("viruses called other", *(f"{one.viral_called_other:,}" for one in confusions)),
        ("others called virus", *(f"{one.other_called_virus:,}" for one in confusions)),
        ("others called other", *(f"{one.other_called_other:,}" for one in confusions)),
    ]
    return table(("", *levels), rows)


def _by_class(figures: Metrics) -> list[str]:
    rows = [
        (
            cell(one.name),
            f"{one.count:,}",
            f"{one.scored:,}",
            f"{one.called_virus:,}",
            f"{one.called_virus / one.scored:.1%}" if one.scored else "n/a",
        )
        for one in figures.by_class
    ]
    return table(("class", "all", "with a score", "called virus", "share"), rows)


def _by_length(figures: Metrics) -> list[str]:
    rows = [
        (
            f"{one.shortest:,} bp and more"
            if one.longest is None
            else f"{one.shortest:,} to {one.longest:,} bp",
            f"{one.count:,}",
            f"{one.scored:,}",
            number(one.auroc),
            number(one.accuracy),
            f"{one.confusion.viral_called_virus:,} of "
            f"{one.confusion.viral_called_virus + one.confusion.viral_called_other:,}",
            f"{one.confusion.other_called_virus:,} of "
            f"{one.confusion.other_called_virus + one.confusion.other_called_other:,}",
        )
        for one in figures.by_length
    ]
    header = ("record", "all", "with a score", "AUROC", "accuracy", "viruses found", "others called virus")
    return table(header, rows)


def _reliability(figures: Metrics) -> list[str]:
    rows = [
        (f"{one.low:.1f} to {one.high:.1f}", f"{one.count:,}", number(one.mean_p), number(one.share_viral))
        for one in figures.reliability
    ]
    return table(("P(virus)", "sequences", "mean P(virus)", "share of viruses"), rows)
