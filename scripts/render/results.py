"""The tables of the documentation that come from result files: what each row is, and how its cells are written."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from scripts.render.tables import Json, MakeTable, Results, markdown, table


def of_kind(results: Results, kind: str) -> list[tuple[str, Json]]:
    return [(name, result) for name, result in results.items() if result.get("kind") == kind]


def bench_cases(results: Results) -> Iterator[Json]:
    """`auto` marks the precision that `auto` takes. Older files lack some figures."""
    for name, result in of_kind(results, "bench"):
        for case in result["cases"]:
            lacking = dict.fromkeys(("tflops", "of_peak", "tokens_per_joule"))
            auto = " (auto)" if case.get("auto_precision") == case["precision"] else None
            yield {**lacking, **case, "auto": auto, "file": name, "others": result["cases"]}


def precision_rows(results: Results) -> Iterator[Json]:
    """Speed of each precision relative to bf16, and of mixed lengths to one length, within a run."""
    for case in bench_cases(results):
        own = {key: case[key] for key in ("model", "precision", "lengths")}
        over: Json = {"over_bf16": None, "over_fixed": None}
        for name, change in (("over_bf16", {"precision": "bf16"}), ("over_fixed", {"lengths": "fixed:166"})):
            wanted = own | change
            for other in case["others"]:
                if wanted != own and wanted == {key: other[key] for key in own}:
                    rate, base = (one["forward"]["tokens_per_second"] for one in (case, other))
                    over[name] = rate / base
        if any(over.values()):
            yield case | over


def end_to_end_rows(results: Results) -> Iterator[Json]:
    for case in bench_cases(results):
        for run in case["end_to_end"]:
            yield {**case, **run, "gpus": len(run["devices"])}


def peer_rows(results: Results) -> list[Json]:
    rows: list[Json] = []
    for name, result in of_kind(results, "peers"):
        ours: list[Json] = [
            {
                "model": case["model"].rpartition(":")[2],
                "lengths": case["lengths"],
                "program": f"virnuc {case['precision']}",
                "rate": case["forward"]["letters_per_second"],
                **{"ratios": None, "why": None, "file": name},
            }
            for case in result["cases"]
        ]
        for peer in result["peers"]:
            rate, lengths = peer.get("residues_per_second"), peer.get("lengths", "")
            same = [own for own in ours if (own["model"], own["lengths"]) == (peer["model"], lengths)]
            row = {"model": peer["model"], "lengths": lengths, "program": peer["peer"], "rate": rate}
            row["ratios"] = ", ".join(
                f"{own['program'].removeprefix('virnuc ')} {own['rate'] / rate:.2f}" for own in same if rate
            )
            why = None if rate else peer.get("skipped", "no memory")
            rows.append({**row, "why": why, "file": name if rate else None})
        rows += ours
    return sorted(rows, key=lambda row: (row["model"], row["lengths"]))


def precision_accuracy_rows(results: Results) -> Iterator[Json]:
    for name, result in of_kind(results, "accuracy"):
        models = [result["models"][key].rpartition(":")[2] for key in ("esm_model", "dnabert_model")]
        for precision, found in result["against_fp32"].items():
            shares = dict.fromkeys(f"{unit}_calls_agree" for unit in ("frame", "chunk", "contig"))
            names = {"models": " and ".join(dict.fromkeys(models)), "precision": precision, "file": name}
            yield {**names, "frames": result["frames"], **shares, **found}


def run_rows(results: Results) -> Iterator[Json]:
    for name, result in results.items():
        if "kind" in result and "device" in result.get("machine", ()):
            machine = result["machine"]
            versions = [f"{key} {machine[key]}" for key in ("torch", "cuda", "triton") if machine[key]]
            driver = f", driver {machine['driver_version']}" if "driver_version" in machine else ""
            where = f"{machine['device']}{driver}; {', '.join(versions)}"
            yield {"file": name, "command": result["command"], "machine": where}


def bundled_sets(results: Results) -> Iterator[tuple[str, str, Json]]:
    """Title, what was measured, and figures of the bundled models."""
    for file, title in (("far_auroc", "distant families"), ("val_auroc", "validation set")):
        for kind, group in results[file]["sets"].items():
            yield title, kind, group


def summary_rows(results: Results) -> Iterator[Json]:
    """One row a length; all of the sequences, but for the calibration error."""
    for title, kind, group in bundled_sets(results):
        yield {**group, "title": title, "kind": kind}


def class_table(results: Results, wanted: str) -> str:
    groups = {kind: own["by_class"] for title, kind, own in bundled_sets(results) if title == wanted}
    rows = [
        [name, *(f"{group[name]['called_virus']:.1%}" if name in group else "" for group in groups.values())]
        for name in sorted({name for group in groups.values() for name in group})
    ]
    return markdown("|".join(["class", *groups]), rows)


def score_sets(results: Results) -> Iterator[Json]:
    """The sets of the scoreboard; `title` is the set's name, with the length of its pieces if it is cut."""
    for own in results["scoreboard"]["sets"]:
        yield {**own, "title": f"{own['name']}, {own['length']:,} bp" if own["length"] else own["name"]}


def score_tables(results: Results) -> str:
    """A table for each figure of all sequences, with a row for each set and a column for each program."""
    figures: dict[str, Callable[[Json], str]] = {
        "AUROC": lambda own: f"{own['auroc']:.3f}",
        "Matthews correlation (MCC) of the calls": lambda own: f"{own['mcc']:.3f}",
        "Precision / recall of the calls": lambda own: (
            f"{own['precision']:.0%} / {own['recall']:.0%}" if own["recall"] else "no calls"
        ),
    }
    sets = [
        (own["title"], [found["all"] for found in own["results"].values()]) for own in score_sets(results)
    ]
    header = "|".join(["sequences", *results["scoreboard"]["sets"][0]["results"]])
    parts = []
    for title, cell in figures.items():
        rows = [[name, *map(cell, found)] for name, found in sets]
        parts.append(f"{title}:\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def score_speed_table(results: Results) -> str:
    """Seconds and peak memory in MB of each program, a row for each set."""
    sets = [*score_sets(results)]
    rows = [
        [own["title"], f"{own['bases'] / 1e6:.1f}"]
        + [f"{run['seconds']:.1f} ({run['peak_mb']:,})" for run in own["runs"].values()]
        for own in sets
    ]
    return markdown("|".join(["sequences", "Mbp", *sets[0]["runs"]]), rows)


def score_class_table(results: Results) -> str:
    """Share of each class that is called a virus, one column for each program, of pieces of 5,000 bp."""
    chosen = [own for own in score_sets(results) if own["length"] == 5_000]
    programs = list(chosen[0]["results"])
    rows = [
        [own["title"], kind, f"{count:,}"]
        + [f"{own['results'][program]['all']['called_virus'][kind]:.1%}" for program in programs]
        for own in chosen
        for kind, count in own["classes"].items()
    ]
    return markdown("|".join(["pieces", "class", "number", *programs]), rows)


def calls_table(results: Results) -> str:
    """Mixtures of distant families by their share of viruses: precision and recall by default, and recall at 0.5."""
    rows = [
        [
            f"{row['share']:.1%}",
            f"{row['precision']:.1%}",
            f"{row['recall']:.1%}",
            f"{row['recall_at_half']:.1%}",
        ]
        for row in results["calls"]["mixtures"]
    ]
    return markdown("share of viruses|precision|recall|recall of `--relaxed`", rows)


def provirus_text(results: Results) -> str:
    found = results["calls"]["proviruses"]
    return (
        f"Of {found['contigs']} phages of 15 to 20 kb put into 30 kb of bacterial sequence, {found['found']} are found with an overlap of "
        f"{found['min_overlap']:.0%} or more ([calls.json](../benchmarks/results/calls.json))."
    )


def score_conditions(results: Results) -> str:
    found = results["scoreboard"]
    versions = ", ".join(f"{name} ({version})" for name, version in found["programs"].items())
    computer, trained = found["machine"], found["kmer_training"]
    of_sets = [own["results"]["virnuc"]["all"] for own in found["sets"]]
    viral = sorted(own["viral"] / own["sequences"] for own in of_sets)
    return (
        f"From [scoreboard.json](../benchmarks/results/scoreboard.json):\n\n    {found['command']}\n\n"
        f"{viral[0]:.0%} to {viral[-1]:.0%} of the {of_sets[0]['sequences']} sequences of a set are viral. "
        f"{computer['cpu']}, {computer['threads']} cores; torch {computer['torch']}, Python {computer['python']}. "
        f"Programs: {versions}. Training the 6-mer classifier took {trained['seconds']:.0f} s and {trained['peak_mb']:,} MB."
    )


_SUMMARY: Final[dict[str, MakeTable]] = {
    "summary": table(
        "set|sequences|number|with a score|AUROC|recall|false positives|precision|calibration error",
        "{title}|{kind}|{count:,}|{share_scored:.1%}|{auroc:.3f}|{recall:.1%}|{false_positive_rate:.1%}|{precision:.1%}"
        "|{ece_balanced:.3f}",
        summary_rows,
    )
}
PAGES: Final[dict[str, dict[str, MakeTable]]] = {
    "docs/performance.md": {
        "forward": table(
            "model|precision|lengths|tokens/s|letters/s|sequences/s|TFLOP/s|of the peak|tokens/J|floor, tokens/s|of the floor"
            "|spread|memory, GB|packed|file",
            "{model:plain}|{precision}{auto}|{lengths}|{forward[tokens_per_second]:count}|{forward[letters_per_second]:count}"
            "|{forward[sequences_per_second]:count}|{tflops:.0f}|{of_peak:percent}|{tokens_per_joule:count}"
            "|{floor_tokens_per_second:count}|{over_floor:.3f}"
            "|{forward[repeats]:spread}|{peak_memory_bytes:GB}|{forward[packing_efficiency]:.3f}|{file}",
            bench_cases,
        ),
        "precision": table(
            "model|precision|lengths|over own bf16|over fixed:166|file",
            "{model:plain}|{precision}|{lengths}|{over_bf16:.3f}|{over_fixed:.3f}|{file}",
            precision_rows,
        ),
        "end-to-end": table(
            "model|precision|lengths|GPUs|sequences/s|tokens/s|of forward passes alone|of linear|seconds measured|load, s"
            "|file",
            "{model:plain}|{precision}|{lengths}|{gpus}|{speed[sequences_per_second]:count}"
            "|{speed[tokens_per_second]:count}|{over_gpu_only:.3f}|{over_linear:.3f}|{work_seconds:each}"
            "|{load_seconds:.1f}|{file}",
            end_to_end_rows,
        ),
        "peers": table(
            "model|lengths|program|residues/s|virnuc over it|file",
            "{model}|{lengths}|{program}|{rate:count}{why}|{ratios}|{file}",
            peer_rows,
        ),
        "accuracy": table(
            "models|precision|ORFs|worst cosine, protein|worst cosine, DNA|calls of ORFs agree|chunks|contigs"
            "|file",
            "{models}|{precision}|{frames:,}|{protein[worst_cosine]:cosine}|{dna[worst_cosine]:cosine}"
            "|{frame_calls_agree:share}|{chunk_calls_agree:share}|{contig_calls_agree:share}|{file}",
            precision_accuracy_rows,
        ),
        "runs": table("file|command|machine", "{file}.json|`{command}`|{machine}", run_rows),
    },
    "docs/accuracy.md": {
        "conditions": score_conditions,
        "calls": calls_table,
        "classes": score_class_table,
        "scores": score_tables,
        "speed": score_speed_table,
    },
    "docs/model-card.md": {
        **_SUMMARY,
        "far classes": partial(class_table, wanted="distant families"),
        "val classes": partial(class_table, wanted="validation set"),
    },
    "docs/science.md": {"proviruses": provirus_text},
    "README.md": _SUMMARY,
}
