"""Tables of docs/performance.md: speed against the floor and other programs, and accuracy of each precision."""

from collections.abc import Iterator
from typing import Final

from scripts.render.tables import Json, MakeTable, Results, of_kind, table


def bench_cases(results: Results) -> Iterator[Json]:
    """Every case of virnuc's own benchmark with its file."""
    for name, result in of_kind(results, "bench"):
        for case in result["cases"]:
            yield {**case, "file": name, "others": result["cases"]}


def precision_rows(results: Results) -> Iterator[Json]:
    """Speed of each precision relative to bf16, and of mixed lengths to one length, within a run."""
    for case in bench_cases(results):
        own = {key: case[key] for key in ("model", "precision", "lengths")}
        over: Json = {"over_bf16": None, "over_fixed": None}
        for name, change in (("over_bf16", {"precision": "bf16"}), ("over_fixed", {"lengths": "fixed:166"})):
            wanted = own | change
            for other in case["others"]:
                if wanted != own and wanted == {key: other[key] for key in own}:
                    speeds = (one["forward"]["tokens_per_second"] for one in (case, other))
                    over[name] = next(speeds) / next(speeds)
        if any(over.values()):
            yield case | over


def end_to_end_rows(results: Results) -> Iterator[Json]:
    """From stored sequences to shards on disk."""
    for case in bench_cases(results):
        for run in case["end_to_end"]:
            yield {**case, **run, "gpus": len(run["devices"])}


def peer_rows(results: Results) -> list[Json]:
    """Residues/s of other programs, and virnuc's speedup in the same run."""
    rows: list[Json] = []
    for name, result in of_kind(results, "peers"):
        ours = [
            {
                "model": case["model"].rpartition(":")[2],
                "lengths": case["lengths"],
                "program": f"virnuc {case['precision']}",
                "rate": case["forward"]["letters_per_second"],
                "ratios": None,
                "why": None,
                "file": name,
            }
            for case in result["cases"]
        ]
        for peer in result["peers"]:
            rate, lengths = peer.get("residues_per_second"), peer.get("lengths", "")
            same = [own for own in ours if (own["model"], own["lengths"]) == (peer["model"], lengths)]
            ratios = [
                f"{own['program'].removeprefix('virnuc ')} {own['rate'] / rate:.2f}" for own in same if rate
            ]
            row = {"model": peer["model"], "lengths": lengths, "program": peer["peer"], "rate": rate}
            why = None if rate else peer.get("skipped", "no memory")
            rows.append({**row, "why": why, "ratios": ", ".join(ratios), "file": name if rate else None})
        rows += ours
    return sorted(rows, key=lambda row: (row["model"], row["lengths"]))


def attention_rows(results: Results) -> Iterator[Json]:
    """Milliseconds of every attention candidate, as a layer calls it, and without the rotation."""
    for name, result in of_kind(results, "flash-attention"):
        for row in result["attention"]:
            if "failed" not in row:
                yield {"without_rotation": {"ms": None}, **row, "file": name}


def attention_failures(results: Results) -> Iterator[Json]:
    """Cases that a candidate could not run, and why."""
    for name, result in of_kind(results, "flash-attention"):
        cases: dict[tuple[str, str], list[str]] = {}
        for row in (*result["attention"], *result["forward"]):
            if "failed" in row:
                named = cases.setdefault((row["candidate"], row["failed"]), [])
                named.append(f"{row['model']} {row['precision']}")
        for (candidate, why), named in cases.items():
            shown = ", ".join(dict.fromkeys(named))
            yield {"candidate": candidate, "cases": shown, "why": why, "file": name}


def attention_forward_rows(results: Results) -> Iterator[Json]:
    """Whole models with every backend, relative to the first, virnuc's own, in the same run."""
    for name, result in of_kind(results, "flash-attention"):
        first: dict[tuple[str, ...], float] = {}
        for row in result["forward"]:
            if "failed" not in row:
                rate = row["tokens_per_second"]
                own = first.setdefault((row["model"], row["precision"], row["lengths"]), rate)
                yield {**row, "share": rate / own, "file": name}


def accuracy_rows(results: Results) -> Iterator[Json]:
    """Each precision against fp32 on the same device."""
    for name, result in of_kind(results, "accuracy"):
        models = [result["models"][key].rpartition(":")[2] for key in ("esm_model", "dnabert_model")]
        for precision, found in result["against_fp32"].items():
            shares = dict.fromkeys(f"{unit}_calls_agree" for unit in ("frame", "chunk", "contig"))
            names = {"models": " and ".join(dict.fromkeys(models)), "precision": precision, "file": name}
            yield {**names, "frames": result["frames"], **shares, **found}


def run_rows(results: Results) -> Iterator[Json]:
    """Command and machine of every file about the speed of a device."""
    for name, result in results.items():
        if "kind" in result and "device" in result.get("machine", ()):
            machine = result["machine"]
            versions = [f"{key} {machine[key]}" for key in ("torch", "cuda", "triton") if machine[key]]
            driver = f", driver {machine['driver_version']}" if "driver_version" in machine else ""
            where = f"{machine['device']}{driver}; {', '.join(versions)}"
            yield {"file": name, "command": result["command"], "machine": where}


TABLES: Final[dict[str, MakeTable]] = {
    "forward": table(
        "model|precision|lengths|tokens/s|letters/s|sequences/s|floor, tokens/s|of the floor|spread|memory, GB|packed"
        "|file",
        "{model:plain}|{precision}|{lengths}|{forward[tokens_per_second]:count}|{forward[letters_per_second]:count}"
        "|{forward[sequences_per_second]:count}|{floor_tokens_per_second:count}|{over_floor:.3f}"
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
    "flash-attention": table(
        "model|precision|lengths|kernel|ms|ms without rotation|spread|relative error|file",
        "{model}|{precision}|{lengths}|{candidate}|{as_called[ms]:.3f}|{without_rotation[ms]:.3f}"
        "|{as_called[repeats]:spread}|{relative_error:.1e}|{file}",
        attention_rows,
    ),
    "flash-forward": table(
        "model|precision|lengths|attention|tokens/s|over the first|spread|file",
        "{model}|{precision}|{lengths}|{candidate}|{tokens_per_second:count}|{share:.3f}|{repeats:spread}|{file}",
        attention_forward_rows,
    ),
    "flash-failures": table(
        "kernel|not measured|why|file", "{candidate}|{cases}|{why}|{file}", attention_failures
    ),
    "peers": table(
        "model|lengths|program|residues/s|virnuc over it|file",
        "{model}|{lengths}|{program}|{rate:count}{why}|{ratios}|{file}",
        peer_rows,
    ),
    "accuracy": table(
        "models|precision|stretches|worst cosine, protein|worst cosine, DNA|calls of stretches agree|chunks|contigs"
        "|file",
        "{models}|{precision}|{frames:,}|{protein[worst_cosine]:cosine}|{dna[worst_cosine]:cosine}"
        "|{frame_calls_agree:share}|{chunk_calls_agree:share}|{contig_calls_agree:share}|{file}",
        accuracy_rows,
    ),
    "runs": table("file|command|machine", "{file}.json|`{command}`|{machine}", run_rows),
}
