"""What train and evaluate do: the body of their flows, and of a run without Prefect."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flows import runs
from flows.computed_run import choose_lanes, compute_run
from flows.outputs import require_absolute, require_head_name, require_no_input, require_replaceable
from tasks.artifacts import in_flow
from tasks.heads import (
    EVALUATION_FILES,
    EvaluationReport,
    TrainingReport,
    card_of,
    evaluate_run,
    publish_head,
)
from tasks.run_entries import EVALUATED_RUN, evaluation_entry
from tasks.stages import Resumable
from tasks.tracking import start_tracking, track
from virnuc_core.files import require_utf8
from virnuc_core.models.catalogue import is_own_head
from virnuc_core.pipeline import TRAIN, Run, Training
from virnuc_core.remote import is_url
from virnuc_core.results.run_opening import (
    LOCK_NAME,
    is_plan,
    locking,
    open_run_folder,
    require_inside,
    require_no_own_file,
    require_none,
)
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder
from virnuc_core.settings import LaneSettings, PredictSettings, TrainSettings, train_config
from virnuc_core.training.fit import TrainerSettings
from virnuc_core.training.heads import HeadSettings, label_records
from virnuc_core.training.labels import LabelledFiles

read_labels = Resumable(label_records, "label")


def train(
    files: LabelledFiles, out: str, settings: TrainSettings, force: bool, where: LaneSettings
) -> TrainingReport:
    """See the flow `train`; raises VirnucError."""
    head = Path(out)
    read = _require_places(files, head, settings, force=force)
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

    with open_run_folder(Path(f"{out}{EMBED_SUFFIX}"), force=force, inputs=read) as folder:
        if force:
            head.resolve().unlink(missing_ok=True)
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
    with _open_evaluation(folder, files.paths):
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


@contextmanager
def _open_evaluation(folder: Path, inputs: Sequence[str]) -> Iterator[None]:
    """Locks the folder of an evaluation, in which its run has one of its own; raises UsageError as `open_run_folder`."""
    require_utf8(str(folder), *inputs)
    sequences = RunFolder(folder).sequences
    if folder.is_dir():
        names = {*EVALUATION_FILES, sequences.name, EVALUATED_RUN}
        require_inside(folder, names)
        require_no_own_file(folder, names, inputs)
        if not is_plan(RunFolder(folder / EVALUATED_RUN).plan):
            require_none(filter(os.path.lexists, (folder / name for name in EVALUATION_FILES)), folder)
            if not (folder / LOCK_NAME).exists():
                require_none(sequences.glob("genbank_*"), folder)
    with locking(folder):
        yield


def _trainer_settings(settings: TrainSettings) -> TrainerSettings:
    if settings.frames == "open":
        return TrainerSettings(seed=settings.seed, members=settings.members, epochs=settings.epochs)
    return TrainerSettings(seed=settings.seed, members=1, epochs=settings.epochs, weight_decay=0.1)


def _require_places(
    files: LabelledFiles, head: Path, settings: TrainSettings, *, force: bool
) -> tuple[str, ...]:
    """The files that are read."""
    groups = () if settings.groups is None else (settings.groups,)
    read = (*itertools.filterfalse(is_url, files.paths), *groups)
    require_absolute(*read, str(head))
    require_head_name(head)
    for written in (head, card_of(head)):
        require_no_input(written, read)
    require_replaceable(head, is_own_head, "head", force=force)
    if not head.exists() and not is_plan(RunFolder(Path(f"{head}{EMBED_SUFFIX}")).plan):
        require_none(filter(os.path.lexists, [card_of(head)]), head)
    return read
