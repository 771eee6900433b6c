"""The train flow: a classifier head from labelled sequences."""

import itertools
from pathlib import Path

from prefect import flow

from flows.computed_run import choose_lanes, compute_run, labelled_name
from flows.outputs import require_absolute, require_head_name, require_no_input
from tasks.artifacts import attach_api_log_handler
from tasks.heads import TrainingReport, card_of, publish_head
from tasks.publishing import publish
from tasks.tracking import TrackedRun
from virnuc_core.models.catalogue import index_path
from virnuc_core.pipeline import TRAIN, Run, Training
from virnuc_core.remote import is_url
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import EMBED_SUFFIX
from virnuc_core.settings import (
    TRAIN_DEFAULTS,
    LaneMode,
    LaneSettings,
    PositiveTime,
    Priority,
    Project,
    TrainSettings,
    train_config,
)
from virnuc_core.training.heads import HeadSettings
from virnuc_core.training.labels import LabelledFiles
from virnuc_core.training.trainer import TrainerSettings


@flow(name="train", flow_run_name=labelled_name, persist_result=False)
def train(
    files: LabelledFiles,
    out: str,
    settings: TrainSettings = TRAIN_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
) -> TrainingReport:
    """Trains a head; called again with the same arguments, it resumes.

    Args:
        files: labelled sequences; paths or URLs.
        out: file of the head, safetensors; the run's folder is beside it, `OUT.run`, and so is its card.
        settings: models, and how the head is fitted.
        force: keep nothing of an earlier run.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.
        priority: queue in which the lanes wait in the pool.
        project: what the GPU hours count for.
    """
    attach_api_log_handler()
    head = Path(out)
    _require_places(files, head, settings)
    config = train_config(settings)
    head_settings = HeadSettings(
        trainer=_trainer_settings(settings),
        held_out=settings.held_out,
        group_power=settings.group_power,
        most_frames=settings.most_frames,
    )
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    lanes, params = choose_lanes(where, config.devices), {**settings.params, **where.params}
    reports: list[TrainingReport] = []

    def publish_training(run: Run, tracked: TrackedRun) -> None:
        assert isinstance(run, Training)
        publish(run.folder, run.report, tracked)
        reports.append(publish_head(run, tracked, champion=settings.champion))

    with open_run_folder(Path(f"{out}{EMBED_SUFFIX}"), force=force) as folder:
        if force:
            head.unlink(missing_ok=True)
        run = Training(
            folder, config, files, groups=settings.groups, settings=head_settings, lanes=lanes, out=out
        )
        compute_run(run, TRAIN, params, publish_training)
    [report] = reports
    return report


def _trainer_settings(settings: TrainSettings) -> TrainerSettings:
    if settings.frames == "open":
        return TrainerSettings(seed=settings.seed, members=settings.members, epochs=settings.epochs)
    return TrainerSettings(seed=settings.seed, members=1, epochs=settings.epochs, weight_decay=0.1)


def _require_places(files: LabelledFiles, head: Path, settings: TrainSettings) -> None:
    groups = () if settings.groups is None else (settings.groups,)
    read = (*itertools.filterfalse(is_url, files.paths), *groups)
    require_absolute(*read, str(head))
    require_head_name(head)
    for written in (head, card_of(head), index_path(head)):
        require_no_input(written, read)
