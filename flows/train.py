"""Labelled sequences in, a classifier head for the vectors of two models out."""

from pathlib import Path
from typing import Final

from prefect import flow

from flows.labelled_naming import labelled_name
from flows.lanes import choose_lanes, run_lanes
from flows.outputs import require_absolute, require_head_name, require_no_input
from tasks.artifacts import attach_api_log_handler
from tasks.indexing import index
from tasks.labelling import label
from tasks.lanes import LaneTracking, stage_clock
from tasks.publishing import link_run, params_of, prefect_tags, publish
from tasks.results import validate
from tasks.tracking import tracked_run
from tasks.training import HeadSettings, TrainingReport, card_of, divide, fit, head_card_of, publish_head
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import EMBED_SUFFIX
from virnuc_core.settings import TRAIN_DEFAULTS, LaneMode, PositiveTime, TrainSettings, train_config
from virnuc_core.training.labels import LabelledFiles
from virnuc_core.training.trainer import TrainerSettings

_RECORDED: Final = frozenset(
    {
        "dna_alone",
        "groups",
        "seed",
        "held_out",
        "group_power",
        "most_frames",
        "epochs",
        "members",
        "shard_seconds",
    }
)


@flow(name="train", flow_run_name=labelled_name, persist_result=False)
def train(
    files: LabelledFiles,
    out: str,
    settings: TrainSettings = TRAIN_DEFAULTS,
    force: bool = False,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
) -> TrainingReport:
    """Trains a head; called again with the same arguments, it goes on where it stopped.

    Args:
        files: labelled sequences.
        out: file of the head, safetensors; the run's folder is beside it, `OUT.run`, and so is its card.
        settings: models, and how the head is fitted.
        force: keep nothing of an earlier run.
        mode: "local": one lane a device of this machine; "pool": lanes wait for the workers of the work pool.
        lane_minutes: estimated work of a lane in the pool, in minutes.

    Raises:
        VirnucError: what is wrong, where, and what to do.
    """
    attach_api_log_handler()
    head = Path(out)
    _require_places(files, head, settings)
    config, fitting = train_config(settings), _head_settings(settings)
    lanes = choose_lanes(mode, config.devices, lane_minutes)
    asked = {**lanes.settings, "lane_minutes": lane_minutes, **settings.model_dump(include=set(_RECORDED))}
    clock = stage_clock()
    with open_run_folder(Path(f"{out}{EMBED_SUFFIX}"), force=force) as folder:
        if force:
            head.unlink(missing_ok=True)
        with clock.stage("label"):
            labelled = label(files, folder, settings.groups, kinship=True)
        with clock.stage("index"):
            index(folder, labelled.paths, config.chunk_length, "dna", config.rows)
        with clock.stage("divide"):
            division = divide(folder, labelled.table, fitting)
        with clock.stage("plan"):
            planned = lanes.plan(folder, config, "train")
        with tracked_run(labelled_name(), params_of(planned, asked), prefect_tags(folder.root)) as tracked:
            link_run(tracked, planned.inputs, labelled.paths)
            with clock.stage("embed"), LaneTracking(tracked) as lane_tracking:
                reports = run_lanes(lanes, folder, [lane_tracking])
            with clock.stage("validate"):
                validate(folder)
            with clock.stage("fit"):
                fitted = fit(folder, labelled.table, division, fitting, head)
            report = RunReport(
                plan=planned,
                out=out,
                counts=None,
                work=fitted.work,
                lanes=reports,
                seconds=clock.seconds,
                links=tracked.links,
            )
            with clock.stage("publish"):
                publish(folder, report, tracked)
                card = head_card_of(report, labelled, division, fitting)
                return publish_head(folder, card, fitted, report, tracked)


def _require_places(files: LabelledFiles, head: Path, settings: TrainSettings) -> None:
    read = files.paths if settings.groups is None else (*files.paths, settings.groups)
    require_absolute(*read, str(head))
    require_head_name(head)
    for written in (head, card_of(head)):
        require_no_input(written, read)


def _head_settings(settings: TrainSettings) -> HeadSettings:
    return HeadSettings(
        trainer=TrainerSettings(seed=settings.seed, members=settings.members, epochs=settings.epochs),
        held_out=settings.held_out,
        group_power=settings.group_power,
        most_frames=settings.most_frames,
    )
