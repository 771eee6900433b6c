"""The page of a run: results, settings, speed and links."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tasks.pages.markdown import cell, code, links_of, model_name, size, table
from virnuc_core.inference.plan import PlannedModel
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.tables import TableCounts
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FAMILY_NAMES, FRAMES_IN_WORDS, chunks_in_words

_NAMED_INPUTS: Final = 3


def verdict(report: RunReport) -> str:
    """The result in a few words."""
    if report.counts is None:
        return f"{report.work.frames:,} sequences embedded"
    return f"{report.counts.contigs_virus:,} of {report.counts.records:,} contigs are viral, {report.counts.proviruses:,} proviruses"


def run_page(report: RunReport, links: Mapping[str, str]) -> str:
    """The run as Markdown, with named `links`."""
    lines = [f"# {verdict(report)}", "", f"Input: {_inputs(report)}", ""]
    if report.counts:
        plan = report.plan
        lines += [
            f"Chunks of {chunks_in_words(plan.chunk_length)}, their {FRAMES_IN_WORDS[plan.frames]}.",
            "",
        ]
        lines += [*_counts(report.counts), ""]
    lines += [
        *table(
            ("model", "dimensions", "arithmetic", "packing efficiency", "weights"),
            [_model(report, model) for model in report.plan.models],
        ),
        "",
        _speed(report),
        "",
        f"- results: {code(Path(report.out).resolve())}",
        *links_of(links),
    ]
    lines += [f"\n> {note}" for note in report.notes]
    return "\n".join(lines) + "\n"


def packing_rows(report: RunReport) -> list[dict[str, str | float]]:
    """One row per model: packing efficiency over all shards."""
    return [
        {
            "model": FAMILY_NAMES[model.family],
            "weights": model.name,
            "packing efficiency": f"{model.packing_efficiency:.1%}",
            "distinct sequences": model.sequences,
            "tokens": model.tokens,
            "batches": model.batches,
            "batches again in fp32": model.fp32_batches,
            "batches parted for memory": model.out_of_memory,
        }
        for model in report.work.models
    ]


def speed_rows(report: RunReport, folder: RunFolder) -> list[dict[str, str | float]]:
    """One row per lane: device, speed, and in a pool its log file."""
    return [
        {
            "lane": row["lane"],
            "host": row["host"],
            "hardware": f"{row['device_name']} ({row['device']})",
            "shards": row["shards"],
            "sequences": row["sequences"],
            "sequences/s": row["sequences_per_second"],
            "residues/s": row["residues_per_second"],
            **{
                f"{FAMILY_NAMES[model.family]} tokens/s": row.get(f"{model.family}_tokens_per_second", 0.0)
                for model in report.plan.models
            },
            "load s": row["load_seconds"],
            "all s": row["seconds"],
            **({"log": str(folder.lane_log(lane.journal).resolve())} if lane.journal else {}),
        }
        for lane, row in zip(report.lanes, report.lane_rows, strict=True)
    ]


def _inputs(report: RunReport) -> str:
    files = report.plan.inputs
    named = ", ".join(f"**{cell(file.name)}**" for file in files[:_NAMED_INPUTS])
    more = f" and {len(files) - _NAMED_INPUTS} more" if len(files) > _NAMED_INPUTS else ""
    return f"{named}{more} ({size(sum(file.size for file in files))})"


def _counts(counts: TableCounts) -> list[str]:
    numbers = (
        *(counts.contigs_virus, counts.contigs_provirus, counts.contigs_nonviral, counts.contigs_unscored),
        counts.records,
    )
    lines = table(
        ("virus", "provirus", "nonviral", "unscored", "all contigs"), [[f"{number:,}" for number in numbers]]
    )
    if counts.sample:
        lines += ["", f"{counts.sample.in_words.capitalize()}."]
    if counts.rejected:
        lines += ["", f"{counts.rejected:,} records cannot be used: rejected.tsv says why."]
    return lines


def _model(report: RunReport, model: PlannedModel) -> tuple[str, ...]:
    return (
        model_name(model),
        f"{model.spec.embedding_dim}",
        model.arithmetic,
        f"{report.packing_efficiency.get(model.family, 1.0):.1%}",
        code(model.weights_fingerprint[:12]),
    )


def _speed(report: RunReport) -> str:
    speed, total = report.throughput, len(report.plan.shards)
    kept = total - report.num_computed
    if not report.num_computed:
        return f"All {total:,} shards were there from before: nothing was computed."
    lanes = f"{len(report.lanes):,} {'lane' if len(report.lanes) == 1 else 'lanes'}"
    before = f" ({kept:,} were there from before)" if kept else ""
    return (
        f"{report.num_computed:,} of {total:,} shards computed in {lanes}{before}: "
        f"**{speed['sequences_per_second']:,.0f} sequences/s**, {speed['residues_per_second']:,.0f} residues/s, "
        f"{sum(report.seconds.values()):,.0f} s in all."
    )
