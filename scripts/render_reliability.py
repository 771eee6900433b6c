"""Fills the tables of docs/reliability.md from benchmarks/results/reliability/*.json (scripts/result_pages.py).

python -m scripts.render_reliability [--check]
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from scripts.result_pages import RESULTS, ROOT, Json, ResultPage, markdown

Results = Mapping[str, Json]

NAMES: Final = ("kills", "commit_points", "flips", "os_errors", "fuzz", "soak")
MATES: Final = ("batch_mates", "batch_mates_h200", "batch_mates_3B")
WAYS: Final = {
    "inline": "the stages in one process",
    "lane": "with a process for the lane",
    "cli": "`virnuc predict`, Prefect and all",
}


def read_results(folder: Path) -> Results:
    """Every file by its name without suffix."""
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in (*NAMES, *MATES)}


def kills_table(results: Results) -> str:
    """Random kills by the stage that the run was at."""
    found = results["kills"]
    rows = [(stage, str(number)) for stage, number in found["kills_by_stage"].items()]
    ways = ", ".join(f"{number} with {way}" for way, number in found["runs_by_way"].items())
    rows += [
        ("all kills", f"**{found['kills']}**"),
        (f"runs ({ways})", str(found["runs"])),
        ("runs that ended byte-identical to an undisturbed one", f"**{found['identical']}**"),
    ]
    return markdown("killed while|kills", rows)


def commit_points_table(results: Results) -> str:
    """Kills at every commit point, by what is left of the disk."""
    found = results["commit_points"]
    wholes = {
        "as it is": "the disk as it is",
        "content lost": "content that was not synced is lost",
        "names lost": "names that were not synced are lost, too",
    }
    rows = [
        (text, str(found["kills"]), f"**{found['continued_identical'][loss]}**")
        for loss, text in wholes.items()
    ]
    return markdown("the run is continued from|kills|byte-identical in the end", rows)


def flips_table(results: Results) -> str:
    """Flipped bytes by the file and how it is read."""
    rows = [
        (how, str(sum(outcomes.values())), str(outcomes["found"]), str(outcomes["harmless"]))
        for how, outcomes in results["flips"]["outcomes"].items()
    ]
    rows.append(("changed a value without an error", "", "", f"**{results['flips']['silent']}**"))
    return markdown("file|flips read|found|harmless", rows)


def os_errors_table(results: Results) -> str:
    """Calls that fail, by the way the run is made."""
    rows = []
    for way, text in WAYS.items():
        found = results["os_errors"][way]
        endings = ", ".join(f"{ending}: {number}" for ending, number in sorted(found["endings"].items()))
        cases = sum(found["cases"].values())
        rows.append((text, str(cases), endings, f"**{found['resumed_identical']}**"))
    return markdown("run|calls that failed|endings|byte-identical when continued", rows)


def os_error_kinds_table(results: Results) -> str:
    """Calls that fail in one process, by call and error."""
    cases: Counter[str] = Counter(results["os_errors"]["inline"]["cases"])
    calls = sorted({name.rpartition(" ")[0] for name in cases if name != "full disk"})
    errors = ("ENOSPC", "EIO", "EACCES")
    rows = [(call, *(str(cases[f"{call} {error}"]) for error in errors)) for call in calls]
    rows.append(("full from this call on", str(cases["full disk"]), "", ""))
    return markdown(f"call|{'|'.join(errors)}", rows)


def fuzz_table(results: Results) -> str:
    """What became of hostile inputs, by reader."""
    rows = []
    for name, found in results["fuzz"]["readers"].items():
        wrong = sum(found[outcome] for outcome in ("traceback", "crash", "executed", "harmful_message"))
        numbers = (str(found[key]) for key in ("inputs", "accepted", "refused"))
        rest = (str(wrong), str(found["hang"]), f"{found['slowest_seconds']:.2f} s", f"{found['peak_mb']} MB")
        rows.append((name, *numbers, *rest))
    return markdown("reader|inputs|accepted|refused|anything else|over 5 s|slowest|most memory", rows)


def soak_table(results: Results) -> str:
    """What is left after many runs in one process."""
    found = results["soak"]["soak"]
    rows = [
        ("runs one after another", str(found["runs"])),
        ("with other outputs than the first", str(found["with_other_outputs"])),
        ("memory, more with each run (last three quarters)", f"{found['bytes_more_each_run'] / 1000:.1f} kB"),
        ("open files, more at the end", str(found["open_files_more"])),
        ("threads, more at the end", str(found["threads_more"])),
        ("processes left", str(found["processes_left"])),
        ("temporary files left", str(len(found["files_left"]))),
    ]
    return markdown("what|measured", rows)


def large_table(results: Results) -> str:
    """Memory of runs of growing size."""
    rows = [
        (
            f"{found['chunks']:,}",
            f"{found['frames']:,}",
            f"{found['shards']:,}",
            f"{found['seconds'] / 60:.1f} min",
            f"{found['before_bytes'] / 1e6:.0f} MB",
            f"{found['peak_bytes'] / 1e6:.0f} MB",
        )
        for found in results["soak"]["large"]
    ]
    return markdown("chunks|open frames|shards|time|memory before|most memory", rows)


def mates_table(results: Results) -> str:
    """Vectors that other batch mates changed, by model and precision."""
    rows = []
    for name in MATES:
        for case in results[name]["cases"]:
            compared = sum(way["sequences"] for way in case["ways"].values())
            other = sum(way["other"] for way in case["ways"].values())
            model = case["model"].rpartition(":")[2] if "random" in case["model"] else case["model"]
            rows.append((case["device"], model, case["precision"], str(compared), f"**{other}**"))
    return markdown("device|model|precision|vectors compared|with another bit", rows)


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "kills": kills_table,
    "commit-points": commit_points_table,
    "flips": flips_table,
    "os-errors": os_errors_table,
    "os-error-kinds": os_error_kinds_table,
    "fuzz": fuzz_table,
    "soak": soak_table,
    "large": large_table,
    "batch-mates": mates_table,
}
PAGE: Final = ResultPage(
    path=ROOT / "docs" / "reliability.md",
    script="scripts.render_reliability",
    results=RESULTS / "reliability",
    read=read_results,
    tables=TABLES,
)

if __name__ == "__main__":
    sys.exit(PAGE.main())
