"""What all flows over models share: stages as Prefect tasks, lanes, and the MLflow run."""

from collections.abc import Callable, Mapping, Sequence

from flows.lanes import choose_lanes, run_lanes
from tasks.lanes import LaneTracking, current_progress
from tasks.publishing import link_run, params_of, prefect_tags, publish
from tasks.stages import as_tasks
from tasks.tracking import TrackedRun, Value, tracked_run
from virnuc_core import pipeline
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.plan import Kind, RunPlan
from virnuc_core.pipeline import Run, Stage, run_stages
from virnuc_core.results.run_json import RunReport
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import LaneSettings, RunConfig, Settings


class TrackedLanes:
    """Lanes of a flow, each with an MLflow run of its own.

    Raises:
        UsageError: the devices cannot be used in this mode, or there is no pool to use.
        DeviceError: a requested GPU does not exist.
    """

    tracked: TrackedRun

    def __init__(self, devices: tuple[str, ...], settings: LaneSettings) -> None:
        self._lanes = choose_lanes(settings.mode, devices, settings.lane_minutes)
        self.params: Mapping[str, Value] = {**settings.params, **self._lanes.settings}

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Makes the plan on the hardware that will compute it."""
        return self._lanes.plan(folder, config, kind)

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards."""
        with LaneTracking(self.tracked) as observer:
            return run_lanes(self._lanes, folder, [observer])


def _publish(run: Run, tracked: TrackedRun) -> None:
    publish(run.folder, run.report, tracked)


def compute_run(
    run: Run,
    stages: Sequence[Stage],
    *,
    name: str,
    settings: Settings,
    lanes: TrackedLanes,
    publish_run: Callable[[Run, TrackedRun], None] = _publish,
) -> RunReport:
    """Runs the stages of a run; from the plan on, an MLflow run called `name` records them.

    The last stage is replaced by `publish_run`; `embed` must be one of the others.

    Raises:
        VirnucError: from a stage.
    """
    planned = stages.index(pipeline.embed)
    tell = lambda stage: current_progress().stage(stage)  # noqa: E731
    root = run.folder.root
    run_stages(run, as_tasks(stages[:planned]), tell)
    moved_from = {"reprocessed_from": run.old.fingerprint} if isinstance(run, pipeline.Move) else {}
    params = {**settings.params, **params_of(run.plan, {**lanes.params, **moved_from})}
    with tracked_run(name, params, prefect_tags(root)) as tracked:
        run.links, lanes.tracked = tracked.links, tracked
        if run.inputs:
            link_run(tracked, run.plan.inputs, run.inputs)

        def publish(run: Run) -> None:
            publish_run(run, tracked)

        run_stages(run, [*as_tasks(stages[planned:-1]), publish], tell)
    return run.report
