"""The result of a benchmark for people."""

from collections.abc import Iterator, Sequence
from typing import Final

from virnuc_core.benchmark.results import Case

HEADER: Final = (
    *("model", "precision", "lengths", "measured", "tokens/s", "letters/s", "sequences/s"),
    *("over", "ratio", "memory GB", "packed"),
)


def table_rows(cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """The cells below `HEADER`: forward passes against the floor, then end to end against forward passes."""
    for case in cases:
        names = (case.model, case.precision, case.lengths)
        memory = "" if case.peak_memory_bytes is None else f"{case.peak_memory_bytes / 1e9:.1f}"
        yield (
            *names,
            "forward",
            *_rates(case.forward.tokens_per_second, case.forward.letters_per_second),
            f"{case.forward.sequences_per_second:,.0f}",
            f"floor {case.floor_tokens_per_second:,.0f}",
            f"{case.over_floor:.3f}",
            memory,
            f"{case.forward.packing_efficiency:.3f}",
        )
        for run in case.end_to_end:
            linear = "" if run.over_linear is None else f", {run.over_linear:.3f} of linear"
            yield (
                *names,
                f"end to end, {len(run.devices)} device{'s' if len(run.devices) > 1 else ''}",
                *_rates(run.speed.tokens_per_second, run.speed.letters_per_second),
                f"{run.speed.sequences_per_second:,.0f}",
                "forward" + linear,
                f"{run.over_gpu_only:.3f}",
                "",
                f"{run.speed.packing_efficiency:.3f}",
            )


def text_table(cases: Sequence[Case]) -> str:
    """The table in plain text, columns aligned."""
    rows = [HEADER, *table_rows(cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rates(tokens: float, letters: float | None) -> tuple[str, str]:
    return f"{tokens:,.0f}", "" if letters is None else f"{letters:,.0f}"
