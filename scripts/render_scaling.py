"""Fills the tables of docs/scaling.md from benchmarks/results/lane_*.json (scripts/result_pages.py).

python -m scripts.render_scaling [--check]
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final

from scripts.result_pages import RESULTS, ROOT, Json, ResultPage, count, markdown

BILLION: Final = 10**9
# What `lane_minutes` is by default.
DEFAULT_MINUTES: Final = 10


@dataclass(frozen=True, slots=True)
class Results:
    """What was measured, and what was simulated with it."""

    overhead: Json
    scaling: Json

    def cases(self, **others: object) -> list[Json]:
        """Simulations with these values, in the order of the file; of a billion frames in any number of lanes."""
        wanted = {"frames": BILLION, "whole_rounds": False, **others}
        return [
            case
            for case in self.scaling["simulations"]
            if all(case[key] == value for key, value in wanted.items())
        ]

    @property
    def fast(self) -> float:
        """How many times as fast as the measured server the faster one is."""
        return float(self.scaling["assumptions"]["fast_server_times"])


def read_results(folder: Path) -> Results:
    """Both files."""
    overhead, scaling = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("lane_overhead", "lane_simulation")
    )
    return Results(overhead, scaling)


def overhead_table(results: Results) -> str:
    """Seconds of everything that a lane is made of."""
    measured = results.overhead
    pool, process = measured["pool"], measured["device_process"]
    calm = measured["in_process"]["without_heartbeat"]
    beating = measured["in_process"]["with_heartbeat"]
    rows = {
        "`import torch`": measured["program_seconds"]["torch"],
        "`import prefect`": measured["program_seconds"]["Prefect"],
        "everything that a lane's flow run imports": measured["program_seconds"]["flow-run process"],
        "device process on the CPU with the bundled models, until they are loaded": process["load_seconds"],
        "task, in a flow": calm["task"],
        "subflow without work": calm["subflow"],
        "subflow without work, with heartbeats": beating["subflow"],
        "lane as a subflow, nothing to do": calm["lane"],
        "lane as a subflow, nothing to do, with heartbeats": beating["lane"],
        "submitting a lane to the pool": pool["submit_seconds"],
        "lane in the pool: from pending to running": pool["pending_to_running_seconds"],
        "lane in the pool: from one's end to the next one's start, with the poll": pool[
            "completed_to_next_pending_seconds"
        ],
        "lane in the pool: all besides its device process": pool["besides_process_seconds"],
    }
    return markdown(
        "what|least, s|median, s|times",
        (
            (name, f"{min(seconds):.2f}", f"{median(seconds):.2f}", str(len(seconds)))
            for name, seconds in rows.items()
        ),
    )


def server_table(results: Results) -> str:
    """Requests that the server answers."""
    rates = results.overhead["server"]["rates"]
    rows = (
        (name, f"{max(each['answered_per_second']):,.1f}", f"{median(each['refused_per_second']):,.1f}")
        for name, each in rates.items()
    )
    return markdown("request|answered a second, at best|refused a second, median", rows)


def traffic_table(results: Results) -> str:
    """Requests, rows and bytes of a lane, and of a billion frames."""
    pool, lane = results.overhead["pool"], results.scaling["lane"]
    case, *_ = results.cases(lane_minutes=DEFAULT_MINUTES, server_times=results.fast, failures="none")
    amounts = {
        "requests, besides polls": lane["requests"],
        **{f"rows of `{name}`": n for name, n in pool["rows_per_lane"].items() if name != "bytes"},
        "bytes of the database (SQLite)": pool["rows_per_lane"]["bytes"],
    }
    rows = (
        (name, count(n) if n > 100 else f"{n:.1f}", count(n * case["lanes"])) for name, n in amounts.items()
    )
    return markdown(f"what|a lane|10^9 frames, {case['lanes']:,} lanes of {DEFAULT_MINUTES} min", rows)


def work_table(results: Results) -> str:
    """GPU time of a billion frames."""
    rows = []
    for row in results.scaling["work"]:
        hours = BILLION / row["frames_per_second"] / 3600
        rows.append(
            (
                row["models"],
                count(row["frames_per_second"]),
                count(hours),
                *(f"{hours / gpus:.1f} h" for gpus in (8, 100)),
                f"{60 * hours / 1000:.0f} min",
                ", ".join(row["files"]),
            )
        )
    return markdown("models|frames/s, one GPU|GPU hours|8 GPUs|100 GPUs|1,000 GPUs|files", rows)


def storage_table(results: Results) -> str:
    """Bytes of a billion frames in the shards, and as many again in embeddings.h5."""
    rows = [
        (row["models"].replace(" fp16", "").replace(" fp8", ""), dtype, terabytes(BILLION * size))
        for row in results.scaling["work"]
        for dtype, size in row["bytes_per_frame"].items()
    ]
    return markdown(
        "models|`--embeddings`|shards, TB (and `embeddings.h5` as much again)", dict.fromkeys(rows)
    )


def preparing_table(results: Results) -> str:
    """What one process does before the first lane."""
    found = results.scaling["preparing"]
    rows = (
        ("bases that give 10^9 frames in 500 bp chunks", f"{found['bases_per_frame']:,.0f} billion"),
        ("hours of indexing them, one core", f"{BILLION / found['frames_per_second'] / 3600:.1f}"),
        ("frame store, TB", terabytes(BILLION * found["frame_store_bytes_per_frame"])),
    )
    return markdown("10^9 frames|", rows)


def waste_table(results: Results, server_times: float) -> str:
    """Share of GPU time that is wasted, by GPUs and lane size."""
    cases = results.cases(server_times=server_times, failures="as reported")
    minutes = list(dict.fromkeys(case["lane_minutes"] for case in cases))
    rows = []
    for gpus, group in by_gpus(cases):
        wasted = [case["wasted"] for case in group]
        shown = [f"**{percent(w)}**" if w == min(wasted) else percent(w) for w in wasted]
        rows.append((f"{gpus:,}", f"{group[0]['worker_poll_seconds']:.0f}", *shown))
    return markdown("GPUs|poll, s|" + "|".join(f"{m} min" for m in minutes), rows)


def parts_table(results: Results) -> str:
    """Where the waste comes from with lanes of the default size."""
    cases = results.cases(server_times=results.fast, failures="as reported", lane_minutes=DEFAULT_MINUTES)
    rows = (
        (
            f"{case['gpus']:,}",
            f"{case['hours']:.2f}",
            f"{case['lanes']:,}",
            f"{case['failures_met']:.1f}",
            *(percent(case[part]) for part in ("starting", "lost", "idle", "wasted")),
        )
        for case in cases
    )
    return markdown("GPUs|hours|lanes|failures|starting|lost|idle|wasted", rows)


def failures_table(results: Results) -> str:
    """How much failures add."""
    rows = []
    for failures in ("none", *results.scaling["failures"]):
        cases = results.cases(server_times=results.fast, failures=failures)
        for gpus, group in by_gpus(cases):
            if gpus in (8, 100, 1000):
                usual = next(case for case in group if case["lane_minutes"] == DEFAULT_MINUTES)
                rows.append((failures, f"{gpus:,}", f"{usual['failures_met']:.1f}", *best_and_usual(group)))
    return markdown("failures|GPUs|met a lane|best lane|wasted then|wasted at 10 min", rows)


def best_table(results: Results) -> str:
    """The best lane for runs and pools of several sizes, and what whole rounds of lanes would give."""
    rows = []
    fast = results.fast
    for frames in dict.fromkeys(case["frames"] for case in results.scaling["simulations"]):
        kind = {"frames": frames, "server_times": fast, "failures": "as reported"}
        rounds = dict(by_gpus(results.cases(**kind, whole_rounds=True)))
        for gpus, group in by_gpus(results.cases(**kind)):
            usual = next(case for case in rounds[gpus] if case["lane_minutes"] == DEFAULT_MINUTES)
            share = frames / results.scaling["work"][0]["frames_per_second"] / gpus
            names = (f"10^{len(str(frames)) - 1}", f"{gpus:,}", f"{share / 60:,.1f}")
            rows.append((*names, *best_and_usual(group), percent(usual["wasted"])))
    header = "frames|GPUs|work of a GPU, min|best lane|wasted then|wasted at 10 min|the same in whole rounds"
    return markdown(header, rows)


def assumptions_table(results: Results) -> str:
    """What went into the simulation."""
    scaling = results.scaling
    sources = {"load_seconds": "scaling_3B", "weights_seconds": "assumed", "start_seconds": "the three above"}
    rows = [
        (f"`{name}`", amount(value), sources.get(name, "lane_overhead"))
        for name, value in scaling["lane"].items()
    ]
    rows += [(f"`{name}`", amount(value), "assumed") for name, value in scaling["assumptions"].items()]
    rows += [
        (
            f"`{name}_mtbf_hours`",
            amount(scaling["failures"]["as reported"][f"{name}_mtbf"] // 3600),
            "Llama 3",
        )
        for name in ("gpu", "host")
    ]
    return markdown("value||from", rows)


def commands_table(results: Results) -> str:
    """How the files were made."""
    measured = results.overhead
    versions = ", ".join(f"{name} {number}" for name, number in measured["versions"].items())
    where = f"{measured['machine']} (load {measured['load_average'][1]:.1f}); {versions}"
    rows = (
        ("lane_overhead.json", f"`{results.overhead['command'].strip()}`", where),
        ("lane_simulation.json", f"`{results.scaling['command']}`", "the same for every machine"),
    )
    return markdown("file|command|machine", rows)


def by_gpus(cases: list[Json]) -> Iterator[tuple[int, list[Json]]]:
    """Cases of each number of GPUs, with lanes of every size."""
    return ((gpus, list(group)) for gpus, group in groupby(cases, key=lambda case: case["gpus"]))


def best_and_usual(group: list[Json]) -> tuple[str, str, str]:
    """Size and waste of the best lane, and the waste of the default."""
    best = min(group, key=lambda case: case["wasted"])
    usual = next(case for case in group if case["lane_minutes"] == DEFAULT_MINUTES)
    return f"{best['lane_minutes']} min", percent(best["wasted"]), percent(usual["wasted"])


def amount(value: float) -> str:
    """A number, with decimals only where it has some."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def percent(share: float) -> str:
    """A share as per cent."""
    return f"{100 * share:.1f} %"


def terabytes(size: float) -> str:
    """Bytes in TB."""
    return f"{size / 1e12:.2g}" if size < 1e12 else f"{size / 1e12:.1f}"


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "overhead": overhead_table,
    "server": server_table,
    "traffic": traffic_table,
    "work": work_table,
    "storage": storage_table,
    "preparing": preparing_table,
    "best": best_table,
    "waste": lambda results: waste_table(results, results.fast),
    "waste-sqlite": lambda results: waste_table(results, 1),
    "parts": parts_table,
    "failures": failures_table,
    "assumptions": assumptions_table,
    "commands": commands_table,
}
PAGE: Final = ResultPage(
    path=ROOT / "docs" / "scaling.md",
    script="scripts.render_scaling",
    results=RESULTS,
    read=read_results,
    tables=TABLES,
)

if __name__ == "__main__":
    sys.exit(PAGE.main())
