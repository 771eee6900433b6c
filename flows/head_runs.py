"""What train and evaluate do: the body of their flows, and of a run without Prefect."""

import itertools
from functools import partial
from pathlib import Path

from flows import runs
from flows.computed_run import choose_lanes, compute_run
from flows.outputs import require_absolute, require_head_name, require_no_input
from tasks.artifacts import in_flow
from tasks.heads import EvaluationReport, TrainingReport, card_of, evaluate_run, publish_head
from tasks.run_entries import EVALUATED_RUN, evaluation_entry
from tasks.stages import Resumable
from tasks.tracking import start_tracking, track
from virnuc_core.errors import UsageError
from virnuc_core.models.catalogue import index_path
from virnuc_core.pipeline import TRAIN, Run, Training
from virnuc_core.remote import is_url
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder
from virnuc_core.settings import LaneSettings, PredictSettings, TrainSettings, train_config
from virnuc_core.training.heads import HeadSettings, label_records
from virnuc_core.training.labels import LabelledFiles
from virnuc_core.training.trainer import TrainerSettings

read_labels = Resumable(label_records, "label")


def train(
    files: LabelledFiles, out: str, settings: TrainSettings, force: bool, where: LaneSettings
) -> TrainingReport:
    """See the flow `train`; raises VirnucError."""
    head = Path(out)
    _require_places(files, head, settings)
    config = train_config(settings)
    head_settings = HeadSettings(
        trainer=_trainer_settings(settings),
        held_out=settings.held_out,
        group_power=settings.group_power,
        most_frames=settings.most_frames,
    )
    lanes = choose_lanes(where, config.devices)
    reports: list[TrainingReport] = []

    def publish_training(run: Run) -> None:
        assert isinstance(run, Training)
        reports.append(publish_head(run))

    with open_run_folder(Path(f"{out}{EMBED_SUFFIX}"), force=force) as folder:
        if force:
            head.unlink(missing_ok=True)
        run = Training(
            folder, config, files, groups=settings.groups, settings=head_settings, lanes=lanes, out=out
        )
        compute_run(run, TRAIN, where, publish_training)
    [report] = reports
    return report


def evaluate(
    files: LabelledFiles, out: str, settings: PredictSettings, force: bool, where: LaneSettings
) -> EvaluationReport:
    """See the flow `evaluate`; raises VirnucError."""
    require_absolute(*files.paths, out)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {out} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    labelled = read_labels(files, RunFolder(folder), None, kinship=False)
    arguments = labelled.paths, str(folder / EVALUATED_RUN), settings, force
    if in_flow():
        from flows.predict import predict

        run = predict(*arguments, **dict(where))
    else:
        run = runs.predict(*arguments, where)
    report = evaluate_run(folder, run, labelled.table)
    track(start_tracking("", {}), partial(evaluation_entry, folder), out)
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
