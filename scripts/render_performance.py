"""Fills the tables of docs/performance.md from benchmarks/results/*.json (scripts/result_pages.py).

python -m scripts.render_performance [--check]
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts import result_pages
from scripts.result_pages import RESULTS, ROOT, Json, ResultPage, count

NOT_MEASURED: Final = "Not measured yet: `scripts/gpu_check.sh` measures it."


@dataclass(frozen=True, slots=True)
class Result:
    """One result file: its name without folders and suffix, and what is in it."""

    name: str
    document: Json

    @property
    def cases(self) -> list[Json]:
        """The cases of virnuc's own benchmark, if it has any."""
        cases: list[Json] = self.document.get("cases", [])
        return cases


def read_results(folder: Path) -> list[Result]:
    """The results that say of themselves what they are, by name."""
    documents = ((path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))
    return [Result(name, document) for name, document in documents if "kind" in document]


def forward_table(results: list[Result]) -> str:
    """Forward passes against the floor of the same run."""
    rows = [
        (
            plain(case["model"]),
            case["precision"],
            case["lengths"],
            count(case["forward"]["tokens_per_second"]),
            count(case["forward"]["letters_per_second"]),
            count(case["forward"]["sequences_per_second"]),
            count(case["floor_tokens_per_second"]),
            ratio(case["over_floor"]),
            spread(case["forward"]["repeats"]),
            gigabytes(case["peak_memory_bytes"]),
            ratio(case["forward"]["packing_efficiency"]),
            result.name,
        )
        for result in of_kind(results, "bench")
        for case in result.cases
    ]
    header = "model|precision|lengths|tokens/s|letters/s|sequences/s|floor, tokens/s|of the floor"
    return markdown(f"{header}|spread|memory, GB|packed|file", rows)


def precision_table(results: list[Result]) -> str:
    """Speed of each precision over fp16, and of mixed lengths over one length, within a run."""
    rows = []
    for result in of_kind(results, "bench"):
        for case in result.cases:
            changes = {"precision": "fp16"}, {"lengths": "fixed:166"}
            over = [over_case(case, result.cases, change) for change in changes]
            if any(over):
                names = (plain(case["model"]), case["precision"], case["lengths"])
                rows.append((*names, *(ratio(value) for value in over), result.name))
    return markdown("model|precision|lengths|over own fp16|over fixed:166|file", rows)


def end_to_end_table(results: list[Result]) -> str:
    """From stored sequences to shards on the disk."""
    rows = [
        (
            plain(case["model"]),
            case["precision"],
            case["lengths"],
            str(len(run["devices"])),
            count(run["speed"]["sequences_per_second"]),
            count(run["speed"]["tokens_per_second"]),
            ratio(run["over_gpu_only"]),
            ratio(run["over_linear"]),
            " ".join(f"{seconds:.1f}" for seconds in run["work_seconds"]),
            f"{run['load_seconds']:.1f}",
            result.name,
        )
        for result in of_kind(results, "bench")
        for case in result.cases
        for run in case["end_to_end"]
    ]
    header = "model|precision|lengths|GPUs|sequences/s|tokens/s|of forward passes alone|of linear"
    return markdown(f"{header}|seconds measured|load, s|file", rows)


def peers_table(results: list[Result]) -> str:
    """Residues/s of the other programs, and how many times as fast virnuc is in the same run."""
    rows = []
    for result in of_kind(results, "peers"):
        for peer in result.document["peers"]:
            name, model = peer["peer"], peer["model"]
            if peer.get("residues_per_second") is None:
                rows.append((model, peer.get("lengths", ""), name, peer.get("skipped", "no memory"), "", ""))
                continue
            ours = [
                f"{case['precision']} {case['forward']['letters_per_second'] / peer['residues_per_second']:.2f}"
                for case in result.cases
                if plain(case["model"]) == model and case["lengths"] == peer["lengths"]
            ]
            rate = count(peer["residues_per_second"])
            rows.append((model, peer["lengths"], name, rate, ", ".join(ours), result.name))
        for case in result.cases:
            rate = count(case["forward"]["letters_per_second"])
            names = (plain(case["model"]), case["lengths"], f"virnuc {case['precision']}")
            rows.append((*names, rate, "", result.name))
    return markdown("model|lengths|program|residues/s|virnuc over it|file", sorted(rows, key=lambda r: r[:2]))


def flash_attention_table(results: list[Result]) -> str:
    """Attention alone of every candidate: milliseconds as a layer calls it, and without the rotation."""
    rows = []
    for result in of_kind(results, "flash-attention"):
        for row in result.document["attention"]:
            if "failed" in row:
                continue
            names = (row["model"], row["precision"], row["lengths"], row["candidate"])
            alone = row.get("without_rotation")
            rows.append(
                (
                    *names,
                    ratio(row["as_called"]["ms"]),
                    "" if alone is None else ratio(alone["ms"]),
                    spread(row["as_called"]["repeats"]),
                    f"{row['relative_error']:.1e}",
                    result.name,
                )
            )
    header = "model|precision|lengths|kernel|ms|ms without rotation|spread|relative error|file"
    return markdown(header, rows)


def flash_failures_table(results: list[Result]) -> str:
    """Which candidates could not run which cases, and why."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for result in of_kind(results, "flash-attention"):
        for row in (*result.document["attention"], *result.document["forward"]):
            if "failed" in row:
                key = (row["candidate"], row["failed"], result.name)
                cases.setdefault(key, []).append(f"{row['model']} {row['precision']}")
    rows = [
        (candidate, ", ".join(dict.fromkeys(named)), reason, file)
        for (candidate, reason, file), named in cases.items()
    ]
    return markdown("kernel|not measured|why|file", rows)


def flash_forward_table(results: list[Result]) -> str:
    """Whole models with every backend, over virnuc's own in the same run."""
    rows = []
    for result in of_kind(results, "flash-attention"):
        ours: dict[tuple[str, ...], float] = {}
        for row in result.document["forward"]:
            if "failed" in row:
                continue
            case = (row["model"], row["precision"], row["lengths"])
            rate = row["tokens_per_second"]
            ours.setdefault(case, rate)
            share = ratio(rate / ours[case])
            rows.append((*case, row["candidate"], count(rate), share, spread(row["repeats"]), result.name))
    return markdown("model|precision|lengths|attention|tokens/s|over the first|spread|file", rows)


def accuracy_table(results: list[Result]) -> str:
    """Each precision against fp32 on the same device."""
    rows = []
    for result in of_kind(results, "accuracy"):
        models = result.document["models"]
        names = {"protein": models["esm_model"], "dna": models["dnabert_model"]}
        for precision, found in result.document["against_fp32"].items():
            cosines = [found[kind]["worst_cosine"] for kind in names if kind in found]
            agreement = [found.get(f"{unit}_calls_agree") for unit in ("frame", "chunk")]
            rows.append(
                (
                    " and ".join(dict.fromkeys(plain(name) for name in names.values())),
                    precision,
                    f"{result.document['frames']:,}",
                    *(f"{math.floor(cosine * 1e7) / 1e7:.7f}" for cosine in cosines),
                    *("" if share is None else f"{100 * share:.3f} %" for share in agreement),
                    result.name,
                )
            )
    header = "models|precision|frames|worst cosine, protein|worst cosine, DNA|calls of frames agree"
    return markdown(f"{header}|calls of chunks agree|file", rows)


def runs_table(results: list[Result]) -> str:
    """Command, date and machine of every file."""
    rows = []
    for result in results:
        machine = result.document["machine"]
        versions = ", ".join(f"{key} {machine[key]}" for key in ("torch", "cuda", "triton") if machine[key])
        driver = f", driver {machine['driver_version']}" if "driver_version" in machine else ""
        where = f"{machine['device']}{driver}; {versions}"
        rows.append((f"{result.name}.json", f"`{result.document['command']}`", where))
    return markdown("file|command|machine", rows)


def of_kind(results: Iterable[Result], kind: str) -> Iterator[Result]:
    """The results of one kind."""
    return (result for result in results if result.document["kind"] == kind)


def over_case(case: Json, cases: list[Json], change: Json) -> float | None:
    """Tokens/s over those of the case that differs in this only; None where there is none, or it is itself."""
    wanted = {key: case[key] for key in ("model", "precision", "lengths")} | change
    other = next((c for c in cases if all(c[key] == wanted[key] for key in wanted)), case)
    if other is case:
        return None
    return float(case["forward"]["tokens_per_second"] / other["forward"]["tokens_per_second"])


def markdown(header: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A table, or a line that says that there is none yet."""
    measured = list(rows)
    return result_pages.markdown(header, measured) if measured else NOT_MEASURED


def plain(model: str) -> str:
    """A model's name without family and `random:`."""
    return model.rpartition(":")[2]


def ratio(value: float | None) -> str:
    """A ratio; empty for None."""
    return "" if value is None else f"{value:.3f}"


def gigabytes(value: int | None) -> str:
    """Bytes in GB; empty for None."""
    return "" if value is None else f"{value / 1e9:.1f}"


def spread(repeats: list[float]) -> str:
    """Highest minus lowest measurement over the median."""
    return f"{100 * (max(repeats) - min(repeats)) / statistics.median(repeats):.1f} %"


TABLES: Final[dict[str, Callable[[list[Result]], str]]] = {
    "forward": forward_table,
    "precision": precision_table,
    "end-to-end": end_to_end_table,
    "flash-attention": flash_attention_table,
    "flash-forward": flash_forward_table,
    "flash-failures": flash_failures_table,
    "peers": peers_table,
    "accuracy": accuracy_table,
    "runs": runs_table,
}
PAGE: Final = ResultPage(
    path=ROOT / "docs" / "performance.md",
    script="scripts.render_performance",
    results=RESULTS,
    read=read_results,
    tables=TABLES,
)

if __name__ == "__main__":
    sys.exit(PAGE.main())
