"""Benchmark results as JSON and as a table.

A speed has `repeats` (tokens/s of every measurement, with special tokens, without padding) and, at their median,
tokens, sequences and letters per second; letters are residues or bases, null if only tokens were drawn.
"""

import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, Final

import torch

from virnuc_core import __version__
from virnuc_core.inference.nvidia_smi import query_gpus

Json = dict[str, Any]

_HEADER: Final = (
    *("model", "precision", "lengths", "measured", "tokens/s", "letters/s", "sequences/s"),
    *("over", "ratio", "memory GB", "packed"),
)


def speed(
    repeats: Sequence[float], *, tokens: int, sequences: int, letters: int | None, packing_efficiency: float
) -> Json:
    """A speed from its measurements in tokens/s and the totals of the measured work."""
    median = statistics.median(repeats)
    return {
        "tokens_per_second": median,
        "repeats": list(repeats),
        "sequences_per_second": median * sequences / tokens,
        "letters_per_second": None if letters is None else median * letters / tokens,
        "packing_efficiency": packing_efficiency,
    }


def machine(device: str) -> Json:
    """Hardware and versions that a result depends on; those of the GPU as far as nvidia-smi reports them."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    found: Json = {
        "virnuc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "triton": triton,
        "cuda": torch.version.cuda,
    }
    if device == "cpu":
        return {**found, "device": f"{platform.machine()} CPU", "threads": torch.get_num_threads()}
    names = ("driver_version", "power.limit", "clocks.max.sm")
    values = next(iter(query_gpus(names, units=True)), ())
    return {
        **found,
        "device": torch.cuda.get_device_name(device),
        "gpus": torch.cuda.device_count(),
        **{name.replace(".", "_"): value for name, value in zip(names, values, strict=False)},
    }


def text_table(cases: Sequence[Json]) -> str:
    """Forward passes against the floor, then end to end against forward passes, in aligned columns."""
    rows = [_HEADER, *_rows(cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rows(cases: Sequence[Json]) -> Iterator[tuple[str, ...]]:
    for case in cases:
        names = (case["model"], case["precision"], case["lengths"])
        memory = "" if case["peak_memory_bytes"] is None else f"{case['peak_memory_bytes'] / 1e9:.1f}"
        floor = f"floor {case['floor_tokens_per_second']:,.0f}"
        packed = f"{case['forward']['packing_efficiency']:.3f}"
        yield *names, "forward", *_rates(case["forward"]), floor, f"{case['over_floor']:.3f}", memory, packed
        for run in case["end_to_end"]:
            count = len(run["devices"])
            linear = "" if run["over_linear"] is None else f", {run['over_linear']:.3f} of linear"
            yield (
                *names,
                f"end to end, {count} device{'s' if count > 1 else ''}",
                *_rates(run["speed"]),
                "forward" + linear,
                f"{run['over_gpu_only']:.3f}",
                "",
                f"{run['speed']['packing_efficiency']:.3f}",
            )


def _rates(measured: Json) -> tuple[str, str, str]:
    rates = (measured[f"{unit}_per_second"] for unit in ("tokens", "letters", "sequences"))
    tokens, letters, sequences = ("" if rate is None else f"{rate:,.0f}" for rate in rates)
    return tokens, letters, sequences
