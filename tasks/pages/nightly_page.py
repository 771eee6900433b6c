"""Outcome of each file of a nightly run: table, page and metrics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from tasks.artifacts import show_markdown, show_table
from tasks.pages.markdown import cell, code, links_of, table
from tasks.tracking import TrackedRun

FileStatus = Literal["failed", "rejected", "waiting", "done", "kept"]
STATUSES: Final[tuple[FileStatus, ...]] = get_args(FileStatus)  # most urgent first

MAX_ROWS: Final = 1000  # of a page
MAX_NAMED: Final = 3  # failures in the error of a nightly run


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOutcome:
    """Outcome of one file.

    Attributes:
        status: done now, kept from before, rejected as unusable, waiting or failed until next time.
        reason: why, unless done.
        results: results folder, if any.
        contigs: contigs in the file; None without results.
        seconds: wall time of its run in this nightly run.
        link: page of its run, or "".
    """

    path: Path
    status: FileStatus
    reason: str = ""
    results: Path | None = None
    contigs: int | None = None
    contigs_virus: int | None = None
    seconds: float = 0.0
    link: str = ""

    @property
    def name(self) -> str:
        """Printable file name, even if not valid UTF-8."""
        return self.path.name.encode(errors="surrogateescape").decode(errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class NightlyReport:
    """A nightly run over `inbox`, with one outcome per file; `out` holds the results folders."""

    inbox: str
    out: Path
    outcomes: Sequence[FileOutcome]

    @property
    def counts(self) -> dict[FileStatus, int]:
        """Files by status."""
        found = Counter(outcome.status for outcome in self.outcomes)
        return {status: found[status] for status in STATUSES}

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the nightly run; contigs are those of its own runs."""
        done = self._with_status("done")
        return {
            **{f"files_{status}": count for status, count in self.counts.items()},
            "contigs": sum(outcome.contigs or 0 for outcome in done),
            "contigs_virus": sum(outcome.contigs_virus or 0 for outcome in done),
            "run_seconds": round(sum(outcome.seconds for outcome in self.outcomes), 3),
        }

    @property
    def summary(self) -> str:
        """The nightly run in one line."""
        counts = [f"{count} {status}" for status, count in reversed(self.counts.items()) if count]
        return f"{len(self.outcomes)} files: {', '.join(counts)}" if counts else "no files in the inbox"

    @property
    def failures(self) -> str:
        """The first failures as text."""
        failed = self._with_status("failed")
        shown = "; ".join(f"{outcome.name}: {outcome.reason}" for outcome in failed[:MAX_NAMED])
        more = f"; and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
        return f"Failed: {shown}{more}." if failed else ""

    @property
    def rows(self) -> list[dict[str, str | int | float]]:
        """One row per file."""
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
            for outcome in self._with_status(*STATUSES)
        ]

    def markdown(self, links: Mapping[str, str]) -> str:
        """The page of the nightly run, with named `links`."""
        metrics = self.metrics
        lines = [
            f"# {self.summary}",
            "",
            f"- inbox: {code(self.inbox)}",
            f"- results: {code(self.out)}",
            f"- {metrics['contigs']:,} contigs called, {metrics['contigs_virus']:,} of them virus, "
            f"in {metrics['run_seconds']:.0f} s of runs",
            *links_of(links),
        ]
        if done := self._with_status("done"):
            rows = (
                (
                    cell(outcome.name),
                    f"{outcome.contigs or 0:,}",
                    f"{outcome.contigs_virus or 0:,}",
                    f"{outcome.seconds:.1f}",
                    f"[run]({outcome.link})" if outcome.link else code(outcome.results),
                )
                for outcome in done[:MAX_ROWS]
            )
            lines += ["", *table(("file", "contigs", "virus", "seconds", "run"), rows)]
        if others := self._with_status("failed", "rejected", "waiting"):
            lines += ["", "Not done:", ""]
            lines += [f"- {o.status} {code(o.name)}: {cell(o.reason)}" for o in others[:MAX_ROWS]]
        return "\n".join(lines) + "\n"

    def _with_status(self, *statuses: FileStatus) -> list[FileOutcome]:
        return [outcome for status in statuses for outcome in self.outcomes if outcome.status == status]


def publish_nightly(report: NightlyReport, tracked: TrackedRun) -> None:
    """Shows the report on the run's pages in MLflow and Prefect."""
    rows = report.rows
    left_out = f", of which the first {MAX_ROWS} are shown" if len(rows) > MAX_ROWS else ""
    tracked.log_metrics(report.metrics)
    tracked.describe(report.summary)
    show_markdown("virnuc-night", report.markdown(tracked.links), report.summary)
    if rows:
        tracked.log_table("files", rows)
        show_table("virnuc-night-files", rows[:MAX_ROWS], f"{report.summary}{left_out}")
