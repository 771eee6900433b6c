"""GPU hours and cost by project, from the metrics of the runs in MLflow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import Field

from tasks.tracking import find_runs
from virnuc_core.errors import UsageError

Month = Annotated[str, Field(pattern=r"^\d{4}-(0[1-9]|1[0-2])$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectUsage:
    """GPU hours of a project's runs; "" is of runs without one.

    Attributes:
        runs: attempts included.
        gpu_cost: at the prices when the runs ended; None where none was set.
    """

    project: str
    runs: int
    gpu_hours: float
    gpu_cost: float | None

    @property
    def row(self) -> dict[str, str | int | float]:
        """For a table."""
        cost = "NA" if self.gpu_cost is None else round(self.gpu_cost, 2)
        name = self.project or "(none)"
        return {"project": name, "runs": self.runs, "GPU hours": round(self.gpu_hours, 2), "cost": cost}


def last_month() -> Month:
    """The month before this one (UTC)."""
    return f"{datetime.now(UTC).replace(day=1) - timedelta(days=1):%Y-%m}"


def usage_of(month: Month) -> list[ProjectUsage]:
    """Usage of the runs that began in a month (UTC), most GPU hours first.

    Raises:
        UsageError: it is no month, or MLflow cannot be read.
    """
    try:
        begin = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC)
    except ValueError as error:
        raise UsageError(f"{month} is no month: give one such as 2026-11.") from error
    end = (begin + timedelta(days=31)).replace(day=1)
    began = " and ".join(
        f"attributes.start_time {relation} {moment.timestamp() * 1000:.0f}"
        for relation, moment in ((">=", begin), ("<", end))
    )
    return sum_by_project(find_runs(f"metrics.gpu_hours >= 0 and {began}"))


def sum_by_project(runs: Iterable[tuple[Mapping[str, str], Mapping[str, float]]]) -> list[ProjectUsage]:
    """Sums tags and metrics of runs by project."""
    by_project: dict[str, list[Mapping[str, float]]] = {}
    for tags, metrics in runs:
        by_project.setdefault(tags.get("virnuc.project", ""), []).append(metrics)
    usage = []
    for project, found in by_project.items():
        costs = [metrics["gpu_cost"] for metrics in found if "gpu_cost" in metrics]
        hours = sum(metrics["gpu_hours"] for metrics in found)
        cost = sum(costs) if costs else None
        usage.append(ProjectUsage(project=project, runs=len(found), gpu_hours=hours, gpu_cost=cost))
    return sorted(usage, key=lambda one: (-one.gpu_hours, one.project))
