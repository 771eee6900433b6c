"""Tables of docs/reliability.md: kills, failing calls, flipped bytes, hostile input, many and large runs."""

from collections.abc import Iterator
from typing import Final

from scripts.render.tables import Json, MakeTable, Results, table

_WRONG: Final = ("traceback", "crash", "executed", "harmful_message")


def kill_rows(results: Results) -> Iterator[Json]:
    """Random kills by the run's stage."""
    found = results["reliability/kills"]
    for stage, number in found["kills_by_stage"].items():
        yield {"what": stage, "number": number}
    yield {"what": "all kills", "number": f"**{found['kills']}**"}
    ways = ", ".join(f"{number} with {way}" for way, number in found["runs_by_way"].items())
    yield {"what": f"runs ({ways})", "number": found["runs"]}
    yield {
        "what": "runs that ended byte-identical to an undisturbed one",
        "number": f"**{found['identical']}**",
    }


def commit_point_rows(results: Results) -> Iterator[Json]:
    """Kills at every commit point, by the assumed state of the disk."""
    found = results["reliability/commit_points"]
    disks = {
        "as it is": "the disk as it is",
        "content lost": "content that was not synced is lost",
        "names lost": "names that were not synced are lost, too",
    }
    for loss, disk in disks.items():
        yield {"disk": disk, "kills": found["kills"], "identical": found["continued_identical"][loss]}


def flip_rows(results: Results) -> Iterator[Json]:
    """Flipped bytes by file and reader."""
    found = results["reliability/flips"]
    for how, outcomes in found["outcomes"].items():
        yield {"how": how, "all": sum(outcomes.values()), **outcomes}
    silent = f"**{found['silent']}**"
    yield {"how": "changed a value without an error", "all": None, "found": None, "harmless": silent}


def os_error_rows(results: Results) -> Iterator[Json]:
    """Failing calls by kind of run."""
    ways = {
        "inline": "the stages in one process",
        "lane": "with a process for the lane",
        "cli": "`virnuc predict`, Prefect and all",
    }
    for way, text in ways.items():
        found = results["reliability/os_errors"][way]
        endings = ", ".join(f"{ending}: {number}" for ending, number in sorted(found["endings"].items()))
        yield {"way": text, "all": sum(found["cases"].values()), "ended": endings, **found}


def os_error_kinds(results: Results) -> Iterator[Json]:
    """Failing calls in one process, by call and error."""
    cases = results["reliability/os_errors"]["inline"]["cases"]
    for call in sorted({name.rpartition(" ")[0] for name in cases if name != "full disk"}):
        yield {"call": call, **{name: cases.get(f"{call} {name}", 0) for name in ("ENOSPC", "EIO", "EACCES")}}
    yield {"call": "full from this call on", "ENOSPC": cases["full disk"], "EIO": None, "EACCES": None}


def fuzz_rows(results: Results) -> Iterator[Json]:
    """Outcomes of hostile inputs by reader."""
    for name, found in results["reliability/fuzz"]["readers"].items():
        yield {"reader": name, **found, "wrong": sum(found[outcome] for outcome in _WRONG)}


def soak_rows(results: Results) -> Iterator[Json]:
    """Leaks after many runs in one process."""
    found = results["reliability/soak"]["soak"]
    measured = {
        "runs one after another": found["runs"],
        "with other outputs than the first": found["with_other_outputs"],
        "memory, more with each run (last three quarters)": f"{found['bytes_more_each_run'] / 1000:.1f} kB",
        "open files, more at the end": found["open_files_more"],
        "threads, more at the end": found["threads_more"],
        "processes left": found["processes_left"],
        "temporary files left": len(found["files_left"]),
    }
    return ({"what": what, "measured": value} for what, value in measured.items())


def large_rows(results: Results) -> Iterator[Json]:
    """Memory of runs of growing size."""
    for found in results["reliability/soak"]["large"]:
        before, peak = (found[name] / 1e6 for name in ("before_bytes", "peak_bytes"))
        yield {**found, "minutes": found["seconds"] / 60, "before": before, "peak": peak}


def batch_mate_rows(results: Results) -> Iterator[Json]:
    """Vectors that other batch mates changed, by model and precision."""
    for name in ("batch_mates", "batch_mates_h200", "batch_mates_3B"):
        for case in results[f"reliability/{name}"]["cases"]:
            sums = {key: sum(way[key] for way in case["ways"].values()) for key in ("sequences", "other")}
            model = case["model"].rpartition(":")[2] if "random" in case["model"] else case["model"]
            yield {**case, **sums, "model": model}


TABLES: Final[dict[str, MakeTable]] = {
    "kills": table("killed while|kills", "{what}|{number}", kill_rows),
    "commit-points": table(
        "the run is continued from|kills|byte-identical in the end",
        "{disk}|{kills}|**{identical}**",
        commit_point_rows,
    ),
    "flips": table("file|flips read|found|harmless", "{how}|{all}|{found}|{harmless}", flip_rows),
    "os-errors": table(
        "run|calls that failed|endings|byte-identical when continued",
        "{way}|{all}|{ended}|**{resumed_identical}**",
        os_error_rows,
    ),
    "os-error-kinds": table("call|ENOSPC|EIO|EACCES", "{call}|{ENOSPC}|{EIO}|{EACCES}", os_error_kinds),
    "fuzz": table(
        "reader|inputs|accepted|refused|anything else|over 5 s|slowest|most memory",
        "{reader}|{inputs}|{accepted}|{refused}|{wrong}|{hang}|{slowest_seconds:.2f} s|{peak_mb} MB",
        fuzz_rows,
    ),
    "soak": table("what|measured", "{what}|{measured}", soak_rows),
    "large": table(
        "chunks|stop-free frames|shards|time|memory before|most memory",
        "{chunks:,}|{frames:,}|{shards:,}|{minutes:.1f} min|{before:.0f} MB|{peak:.0f} MB",
        large_rows,
    ),
    "batch-mates": table(
        "device|model|precision|vectors compared|with another bit",
        "{device}|{model}|{precision}|{sequences}|**{other}**",
        batch_mate_rows,
    ),
}
