"""Tables of docs/scaling.md: measured costs of a lane (lane_overhead), and simulations based on them (lane_simulation)."""

from collections.abc import Iterator
from itertools import groupby
from statistics import median
from typing import Final

from scripts.render.tables import FORMATS, Json, MakeTable, Results, markdown, table

_BILLION: Final = 10**9
# Default of `lane_minutes`.
_DEFAULT_MINUTES: Final = 10
_FEW_REQUESTS: Final = 0.05  # of a lane, not worth a row
_percent = FORMATS["percent"]


def _cases(results: Results, **others: object) -> list[Json]:
    """Simulations with these values, in file order; by default a billion frames with failures as reported."""
    fast = results["lane_simulation"]["assumptions"]["fast_server_times"]
    usual = {"frames": _BILLION, "server_times": fast, "failures": "as reported"}
    wanted = (usual | others).items()
    return [case for case in results["lane_simulation"]["simulations"] if wanted <= case.items()]


def _by_gpus(cases: list[Json]) -> Iterator[tuple[int, list[Json]]]:
    """Cases by number of GPUs, with lanes of every size."""
    return ((gpus, list(group)) for gpus, group in groupby(cases, key=lambda case: case["gpus"]))


def _usual(group: list[Json]) -> Json:
    return next(case for case in group if case["lane_minutes"] == _DEFAULT_MINUTES)


def _best_and_usual(group: list[Json]) -> Json:
    """Size and waste of the best lane, and the waste of the default."""
    best = min(group, key=lambda case: case["wasted"])
    return {"best": best["lane_minutes"], "wasted": best["wasted"], "usual": _usual(group)["wasted"]}


def overhead_rows(results: Results) -> Iterator[Json]:
    """Seconds of each part of a lane."""
    measured = results["lane_overhead"]
    imports, pool, process = measured["program_seconds"], measured["pool"], measured["device_process"]
    calm, beating = (measured["in_process"][f"{name}_heartbeat"] for name in ("without", "with"))
    rows = {
        "`import torch`": imports["torch"],
        "`import prefect`": imports["Prefect"],
        "everything that a lane's flow run imports": imports["flow-run process"],
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
    for name, seconds in rows.items():
        yield {"what": name, "least": min(seconds), "median": median(seconds), "times": len(seconds)}


def server_rows(results: Results) -> Iterator[Json]:
    """Requests per second of the server."""
    for name, each in results["lane_overhead"]["server"]["rates"].items():
        answered, refused = max(each["answered_per_second"]), median(each["refused_per_second"])
        yield {"request": name, "answered": answered, "refused": refused}


def traffic_table(results: Results) -> str:
    """Requests, rows and bytes of a lane, and of a billion frames."""
    rows = results["lane_overhead"]["pool"]["rows_per_lane"]
    lanes = _cases(results, lane_minutes=_DEFAULT_MINUTES, failures="none")[0]["lanes"]
    amounts = {
        "requests, besides polls": results["lane_simulation"]["lane"]["requests"],
        **{f"rows of `{name}`": n for name, n in rows.items() if name != "bytes"},
        "bytes of the database (SQLite)": rows["bytes"],
    }
    count = FORMATS["count"]
    cells = [(name, count(n) if n > 100 else f"{n:.1f}", count(n * lanes)) for name, n in amounts.items()]
    return markdown(f"what|a lane|10^9 frames, {lanes:,} lanes of {_DEFAULT_MINUTES} min", cells)


def requests_table(results: Results) -> str:
    """Requests of a parent for a lane without work, by version of virnuc."""
    measured = results["lane_requests"]
    kinds = dict.fromkeys(kind for found in measured.values() for kind in found["requests"])
    shares = {
        kind: [found["requests"].get(kind, 0) / found["lanes"] for found in measured.values()]
        for kind in kinds
    }
    rows = [
        (f"`{kind}`", *(f"{share:.2f}" for share in each))
        for kind, each in shares.items()
        if max(each) >= _FEW_REQUESTS
    ]
    in_all = ("all", *(f"**{found['in_all'] / found['lanes']:.2f}**" for found in measured.values()))
    heads = "|".join(f"{commit}, {found['lanes']:,} lanes" for commit, found in measured.items())
    return markdown(f"requests for a lane|{heads}", [*rows, in_all])


def work_rows(results: Results) -> Iterator[Json]:
    """GPU time of a billion frames."""
    for row in results["lane_simulation"]["work"]:
        hours = _BILLION / row["frames_per_second"] / 3600
        shares = {"on_8": hours / 8, "on_100": hours / 100, "minutes_on_1000": 60 * hours / 1000}
        yield {**row, "hours": hours, **shares, "names": ", ".join(row["files"])}


def storage_rows(results: Results) -> Iterator[Json]:
    """Bytes of a billion frames in shards; embeddings.h5 takes as much again."""
    sizes = {
        (row["models"].replace(" fp16", "").replace(" fp8", ""), dtype): _BILLION * size
        for row in results["lane_simulation"]["work"]
        for dtype, size in row["bytes_per_frame"].items()
    }
    return ({"models": models, "dtype": dtype, "size": size} for (models, dtype), size in sizes.items())


def preparing_rows(results: Results) -> Iterator[Json]:
    """Work of one process before the first lane."""
    found = results["lane_simulation"]["preparing"]
    amounts = {
        "bases that give 10^9 frames in 500 bp chunks": f"{found['bases_per_frame']:,.0f} billion",
        "hours of indexing them, one core": f"{_BILLION / found['frames_per_second'] / 3600:.1f}",
        "frame store, TB": FORMATS["TB"](_BILLION * found["frame_store_bytes_per_frame"]),
    }
    return ({"what": what, "amount": amount} for what, amount in amounts.items())


def waste_table(results: Results, **server: float) -> str:
    """Wasted share of GPU time by GPUs and lane size; the best lane of a row is bold."""
    cases = _cases(results, **server)
    rows = []
    for gpus, group in _by_gpus(cases):
        wasted = [case["wasted"] for case in group]
        shown = [f"**{_percent(w)}**" if w == min(wasted) else _percent(w) for w in wasted]
        rows.append((f"{gpus:,}", f"{group[0]['worker_poll_seconds']:.0f}", *shown))
    minutes = dict.fromkeys(case["lane_minutes"] for case in cases)
    return markdown("GPUs|poll, s|" + "|".join(f"{m} min" for m in minutes), rows)


def failure_rows(results: Results) -> Iterator[Json]:
    """Additional waste from failures."""
    for failures in ("none", *results["lane_simulation"]["failures"]):
        for gpus, group in _by_gpus(_cases(results, failures=failures)):
            if gpus in (8, 100, 1000):
                met = _usual(group)["failures_met"]
                yield {"failures": failures, "gpus": gpus, "met": met, **_best_and_usual(group)}


def best_rows(results: Results) -> Iterator[Json]:
    """The best lane for several sizes of runs and pools."""
    rate = results["lane_simulation"]["work"][0]["frames_per_second"]
    for frames in dict.fromkeys(case["frames"] for case in results["lane_simulation"]["simulations"]):
        for gpus, group in _by_gpus(_cases(results, frames=frames)):
            yield {
                "power": len(str(frames)) - 1,
                "gpus": gpus,
                "minutes": frames / rate / gpus / 60,
                **_best_and_usual(group),
            }


def assumption_rows(results: Results) -> Iterator[Json]:
    """Assumptions of the simulation."""
    found = results["lane_simulation"]
    sources = {"load_seconds": "scaling_3B", "weights_seconds": "assumed", "start_seconds": "the three above"}
    measured = [(name, value, sources.get(name, "lane_overhead")) for name, value in found["lane"].items()]
    assumed = [(name, value, "assumed") for name, value in found["assumptions"].items()]
    failures = found["failures"]["as reported"]
    mtbf = [(f"{n}_mtbf_hours", failures[f"{n}_mtbf"] // 3600, "Llama 3") for n in ("gpu", "host")]
    for row in (*measured, *assumed, *mtbf):
        yield dict(zip(("name", "value", "source"), row, strict=True))


def command_rows(results: Results) -> Iterator[Json]:
    """Commands that made the files."""
    measured = results["lane_overhead"]
    versions = ", ".join(f"{name} {number}" for name, number in measured["versions"].items())
    where = f"{measured['machine']} (load {measured['load_average'][1]:.1f}); {versions}"
    yield {"file": "lane_overhead", "command": measured["command"].strip(), "machine": where}
    simulated = {"command": results["lane_simulation"]["command"], "machine": "the same for every machine"}
    yield {"file": "lane_simulation", **simulated}
    asked = "python -m benchmarks.lane_requests --commit COMMIT"
    yield {"file": "lane_requests", "command": asked, "machine": "as for lane_overhead, busier"}


TABLES: Final[dict[str, MakeTable]] = {
    "overhead": table(
        "what|least, s|median, s|times", "{what}|{least:.2f}|{median:.2f}|{times}", overhead_rows
    ),
    "server": table(
        "request|answered a second, at best|refused a second, median",
        "{request}|{answered:,.1f}|{refused:,.1f}",
        server_rows,
    ),
    "traffic": traffic_table,
    "requests": requests_table,
    "work": table(
        "models|frames/s, one GPU|GPU hours|8 GPUs|100 GPUs|1,000 GPUs|files",
        "{models}|{frames_per_second:count}|{hours:count}|{on_8:.1f} h|{on_100:.1f} h|{minutes_on_1000:.0f} min|{names}",
        work_rows,
    ),
    "storage": table(
        "models|`--embeddings`|shards, TB (and `embeddings.h5` as much again)",
        "{models}|{dtype}|{size:TB}",
        storage_rows,
    ),
    "preparing": table("10^9 frames|", "{what}|{amount}", preparing_rows),
    "best": table(
        "frames|GPUs|work of a GPU, min|best lane|wasted then|wasted at 10 min",
        "10^{power}|{gpus:,}|{minutes:,.1f}|{best} min|{wasted:percent}|{usual:percent}",
        best_rows,
    ),
    "waste": waste_table,
    "waste-sqlite": lambda results: waste_table(results, server_times=1),
    "parts": table(
        "GPUs|hours|lanes|failures|starting|lost|idle|wasted",
        "{gpus:,}|{hours:.2f}|{lanes:,}|{failures_met:.1f}|{starting:percent}|{lost:percent}|{idle:percent}"
        "|{wasted:percent}",
        lambda results: _cases(results, lane_minutes=_DEFAULT_MINUTES),
    ),
    "failures": table(
        "failures|GPUs|met a lane|best lane|wasted then|wasted at 10 min",
        "{failures}|{gpus:,}|{met:.1f}|{best} min|{wasted:percent}|{usual:percent}",
        failure_rows,
    ),
    "assumptions": table("value||from", "`{name}`|{value:amount}|{source}", assumption_rows),
    "commands": table("file|command|machine", "{file}.json|`{command}`|{machine}", command_rows),
}
