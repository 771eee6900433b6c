"""What train and evaluate do: the body of their flows, and of a run without Prefect."""

import itertools
from pathlib import Path

from flows import runs
from flows.computed_run import choose_lanes, compute_run, name_of_run, run_title
from flows.outputs import require_absolute, require_head_name, require_no_input
from tasks.artifacts import in_flow
from tasks.heads import RUN_NAME, EvaluationReport, TrainingReport, card_of, evaluate_run, publish_head
from tasks.publishing import link_run, publish, run_tags
from tasks.stages import Resumable
from tasks.tracking import TrackedRun, Value, tracked_run
from virnuc_core.errors import UsageError
from virnuc_core.models.catalogue import chunk_rule_of, head_of, is_registered
from virnuc_core.pipeline import TRAIN, Run, Training
from virnuc_core.remote import is_url
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder
from virnuc_core.settings import LaneSettings, PredictSettings, TrainSettings, predict_config, train_config
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
        title = run_title("train", files.paths)
        compute_run(run, TRAIN, title, where, settings.params, publish_training)
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
    config = predict_config(settings)
    params: dict[str, Value] = {
        **settings.params,
        "kind": "evaluate",
        "head": Path(head_of(config)).name,
        "chunk_length": config.chunk_length if is_registered(config.head) else chunk_rule_of(config),
        "files": ",".join(Path(path).name for path in files.paths),
        "mode": where.mode,
    }
    name = name_of_run(run_title("evaluate", files.paths))
    with tracked_run(name, params, run_tags(folder, where.project), folder) as tracked:
        labelled = read_labels(files, RunFolder(folder), None, kinship=False)
        link_run(tracked, labelled.files, [path for path in files.paths if path != files.labels])
        arguments = labelled.paths, str(folder / RUN_NAME), settings, force
        if in_flow():
            from flows.predict import predict

            run = predict(*arguments, **dict(where))
        else:
            run = runs.predict(*arguments, where)
        return evaluate_run(folder, run, labelled.table, tracked)


def _trainer_settings(settings: TrainSettings) -> TrainerSettings:
    if settings.frames == "open":
        return TrainerSettings(seed=settings.seed, members=settings.members, epochs=settings.epochs)
    return TrainerSettings(seed=settings.seed, members=1, epochs=settings.epochs, weight_decay=0.1)


def _require_places(files: LabelledFiles, head: Path, settings: TrainSettings) -> None:
    groups = () if settings.groups is None else (settings.groups,)
    read = (*itertools.filterfalse(is_url, files.paths), *groups)
    require_absolute(*read, str(head))
    require_head_name(head)
    for written in (head, card_of(head)):
        require_no_input(written, read)
