"""Tables of docs/accuracy.md, from scoreboard.json."""

from collections.abc import Iterator
from typing import Final

from scripts.render import tables
from scripts.render.tables import Json, MakeTable, Results, markdown, table

NOT_MEASURED: Final = "Not measured yet: `python -m benchmarks.scoreboard` measures it."
# The page has the classes at these lengths; the result file has them at all.
CLASS_LENGTHS: Final = (500, 5_000)

_FIGURES: Final = "{auroc:.3f}|{auprc:.3f}|{mcc:.3f}|{precision:.3f}|{recall:.3f}"
_FIGURE_NAMES: Final = "AUROC|AUPRC|MCC|precision|recall"


def sets(results: Results) -> Iterator[Json]:
    """The sets of the scoreboard, none before it is measured; `title` is the length of the pieces, or the set's name."""
    for own in results.get("scoreboard", {}).get("sets", ()):
        yield {**own, "title": f"{own['length']:,} bp" if own["length"] else own["name"]}


def val_rows(results: Results, subset: str) -> Iterator[Json]:
    """Figures of one subset of the pieces of the validation genomes."""
    for own in sets(results):
        for program, subsets in own["results"].items() if own["length"] else ():
            figures = subsets[subset]
            is_calibrated = program == "virnuc"
            yield {
                **figures,
                "title": own["title"],
                "program": program,
                "ece": figures["ece_balanced"] if is_calibrated else None,
            }


def compare_rows(results: Results) -> Iterator[Json]:
    """Figures of the sets that were looked at once, with and without what overlaps with the training data."""
    for own in sets(results):
        subsets = [] if own["length"] else list(next(iter(own["results"].values())))
        for subset in subsets:
            for program, figures in own["results"].items():
                yield {**figures[subset], "title": own["title"], "subset": subset, "program": program}


def overlap_rows(results: Results) -> Iterator[Json]:
    """How much of the compared sets is in the training data."""
    for own in sets(results):
        if "overlap" in own:
            yield {**own, **own["overlap"]}


def tier_rows(results: Results) -> Iterator[Json]:
    """Share of correct calls in each tier."""
    for own in sets(results):
        for program, by_tier in own["tiers"].items():
            for tier, figures in by_tier.items():
                yield {**figures, "title": own["title"], "program": program, "tier": tier}


def speed_rows(results: Results) -> Iterator[Json]:
    """Seconds and memory of each program, start-up first."""
    for program, used in results.get("scoreboard", {}).get("start_up", {}).items():
        rates = {"mbp_per_minute": None, "mbp_per_minute_without_start_up": None, "mbp": None}
        yield {**used, **rates, "title": "start-up", "program": program}
    for own in sets(results):
        for program, used in own["runs"].items():
            yield {**used, "title": own["title"], "program": program, "mbp": own["bases"] / 1e6}


def class_table(results: Results) -> str:
    """Share of each class that is called a virus, one column for each program."""
    chosen = [own for own in sets(results) if own["length"] in CLASS_LENGTHS]
    if not chosen:
        return NOT_MEASURED
    programs = list(chosen[0]["results"])
    rows = [
        [own["title"], kind, f"{count:,}"]
        + [f"{100 * own['results'][program]['all']['called_virus'][kind]:.1f} %" for program in programs]
        for own in chosen
        for kind, count in own["classes"].items()
    ]
    return markdown("|".join(["pieces", "class", "number", *programs]), rows)


def conditions(results: Results) -> str:
    """Command, machine and versions."""
    if "scoreboard" not in results:
        return NOT_MEASURED
    found = results["scoreboard"]
    versions = ", ".join(f"{name} ({version})" for name, version in found["programs"].items())
    computer, trained = found["machine"], found["kmer_training"]
    return (
        f"From [scoreboard.json](../benchmarks/results/scoreboard.json):\n\n    {found['command']}\n\n{computer['cpu']}, {computer['threads']} cores; torch {computer['torch']}, "
        f"Python {computer['python']}. Programs: {versions}. Training the 6-mer classifier took "
        f"{trained['seconds']:.0f} s and {trained['peak_mb']:,} MB."
    )


def _measured(make: MakeTable) -> MakeTable:
    def make_or_say(results: Results) -> str:
        made = make(results)
        return NOT_MEASURED if made == tables.NOT_MEASURED else made

    return make_or_say


_TABLES: Final[dict[str, MakeTable]] = {
    "val": table(
        f"pieces|program|number|viral|scored|{_FIGURE_NAMES}|calibration error",
        "{title}|{program}|{sequences:,}|{viral:,}|{scored:percent}|" + _FIGURES + "|{ece:.3f}",
        lambda results: val_rows(results, "all"),
    ),
    "prokaryotic": table(
        f"pieces|program|number|viral|{_FIGURE_NAMES}",
        "{title}|{program}|{sequences:,}|{viral:,}|" + _FIGURES,
        lambda results: val_rows(results, "without eukaryotic viruses"),
    ),
    "tiers": table(
        "sequences|tier|number|called right|called virus|of these viral",
        "{title}|`{tier}`|{sequences:,}|{right:percent}|{called_virus:,}|{precision:percent}",
        tier_rows,
    ),
    "compare": table(
        f"set|sequences|program|number|viral|scored|{_FIGURE_NAMES}",
        "{title}|{subset}|{program}|{sequences:,}|{viral:,}|{scored:percent}|" + _FIGURES,
        compare_rows,
    ),
    "overlap": table(
        "set|number|overlapping|viral|overlapping viral|mean share found, viral|mean share found, other",
        "{title}|{sequences:,}|{overlapping:,}|{viral:,}|{overlapping_viral:,}|{mean_share_viral:percent}|{mean_share_other:percent}",
        overlap_rows,
    ),
    "speed": table(
        "sequences|program|Mbp|seconds|CPU seconds|Mbp/min|Mbp/min without start-up|peak memory, MB",
        "{title}|{program}|{mbp:.1f}|{seconds:.1f}|{cpu_seconds:.1f}|{mbp_per_minute:.2f}|{mbp_per_minute_without_start_up:.2f}|{peak_mb:,}",
        speed_rows,
    ),
}

TABLES: Final[dict[str, MakeTable]] = {
    "conditions": conditions,
    "classes": class_table,
    **{name: _measured(make) for name, make in _TABLES.items()},
}
