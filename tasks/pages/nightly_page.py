"""What became of each file in a night, for people: a table, a page, and figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from tasks.artifacts import show_markdown, show_table
from tasks.pages.markdown import cell, code, links_of, table
from tasks.tracking import TrackedRun

Status = Literal["failed", "rejected", "waiting", "done", "kept"]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)

# A page of more rows is of no use to a person; what matters stands first.
MAX_ROWS: Final = 1000
# Failures named in the error of a night.
MAX_NAMED: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one file.

    Attributes:
        path: where the file was found.
        status: done now, kept from before, rejected as unusable, waiting or failed until next time.
        reason: why, for whatever is not done.
        results: the folder of its results; None without any.
        contigs: contigs that were looked at; None without results.
        contigs_virus: those called virus.
        seconds: wall time of its run in this night.
        link: page of its run; "" when there is none.
    """

    path: Path
    status: Status
    reason: str = ""
    results: Path | None = None
    contigs: int | None = None
    contigs_virus: int | None = None
    seconds: float = 0.0
    link: str = ""

    @property
    def name(self) -> str:
        """The file's name as it can be shown, also one that is not valid UTF-8."""
        return self.path.name.encode(errors="surrogateescape").decode(errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class NightReport:
    """A night.

    Attributes:
        inbox: where files were looked for.
        out: the folder of the folders of results.
        outcomes: one a file.
    """

    inbox: str
    out: Path
    outcomes: Sequence[Outcome]

    @property
    def counts(self) -> dict[Status, int]:
        """Files by what became of them."""
        found = Counter(outcome.status for outcome in self.outcomes)
        return {status: found[status] for status in STATUSES}

    @property
    def figures(self) -> dict[str, float]:
        """The night in numbers; contigs are those of this night's runs."""
        done = [outcome for outcome in self.outcomes if outcome.status == "done"]
        return {
            **{f"files_{status}": count for status, count in self.counts.items()},
            "contigs": sum(outcome.contigs or 0 for outcome in done),
            "contigs_virus": sum(outcome.contigs_virus or 0 for outcome in done),
            "run_seconds": round(sum(outcome.seconds for outcome in self.outcomes), 3),
        }

    @property
    def summary(self) -> str:
        """The night in one line."""
        counts = [f"{count} {status}" for status, count in reversed(self.counts.items()) if count]
        return f"{len(self.outcomes)} files: {', '.join(counts)}" if counts else "no files in the inbox"

    @property
    def failures(self) -> str:
        """The first failures in words."""
        failed = [outcome for outcome in self.outcomes if outcome.status == "failed"]
        shown = "; ".join(f"{outcome.name}: {outcome.reason}" for outcome in failed[:MAX_NAMED])
        more = f"; and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        return f"Failed: {shown}{more}." if failed else ""

    @property
    def rows(self) -> list[dict[str, str | int | float]]:
        """One row a file: first those that somebody must look at."""
        return [
            {
                "file": outcome.name,
                "status": outcome.status,
                "contigs": "" if outcome.contigs is None else outcome.contigs,
                "virus": "" if outcome.contigs_virus is None else outcome.contigs_virus,
                "seconds": round(outcome.seconds, 1),
                "why": outcome.reason,
                "results": str(outcome.results or ""),
                "run": outcome.link,
            }
            for outcome in self._ordered
        ]

    def markdown(self, links: Mapping[str, str]) -> str:
        """The night as a page.

        Args:
            links: where else to find the night, by name.
        """
        figures = self.figures
        lines = [
            f"# {self.summary}",
            "",
            f"- inbox: {code(self.inbox)}",
            f"- results: {code(self.out)}",
            f"- {figures['contigs']:,} contigs called, {figures['contigs_virus']:,} of them virus, "
            f"in {figures['run_seconds']:.0f} s of runs",
            *links_of(links),
        ]
        done = [outcome for outcome in self.outcomes if outcome.status == "done"]
        if done:
            cells = (_done_cells(outcome) for outcome in done[:MAX_ROWS])
            lines += ["", *table(("file", "contigs", "virus", "seconds", "run"), cells)]
        others = [outcome for outcome in self._ordered if outcome.status not in ("done", "kept")]
        if others:
            lines += ["", "Not done:", ""]
            lines += [f"- {o.status} {code(o.name)}: {cell(o.reason)}" for o in others[:MAX_ROWS]]
        return "\n".join(lines) + "\n"

    @property
    def _ordered(self) -> list[Outcome]:
        """First those that somebody must look at."""
        return sorted(self.outcomes, key=lambda outcome: STATUSES.index(outcome.status))


def publish_night(report: NightReport, tracked: TrackedRun) -> None:
    """Puts the night on the pages of its runs in MLflow and in Prefect."""
    rows = report.rows
    left_out = f", of which the first {MAX_ROWS} are shown" if len(rows) > MAX_ROWS else ""
    tracked.log_metrics(report.figures)
    tracked.describe(report.summary)
    show_markdown("virnuc-night", report.markdown(tracked.links), report.summary)
    if rows:
        tracked.log_table("files", rows)
        show_table("virnuc-night-files", rows[:MAX_ROWS], f"{report.summary}{left_out}")


def _done_cells(outcome: Outcome) -> tuple[str, ...]:
    numbers = (f"{outcome.contigs or 0:,}", f"{outcome.contigs_virus or 0:,}", f"{outcome.seconds:.1f}")
    return (cell(outcome.name), *numbers, f"[run]({outcome.link})" if outcome.link else code(outcome.results))
