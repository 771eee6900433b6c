"""The four runs from top to bottom, as the Python API, the command line and the flows call them."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from virnuc_core.errors import DamagedFileError
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.inference.runner import load_planned_head
from virnuc_core.inference.shard import (
    ShardCounters,
    iter_shard_results,
    pending_shards,
    remove_shard_temporaries,
)
from virnuc_core.models.catalogue import chunks_of
from virnuc_core.plain_text import without_secrets
from virnuc_core.remote import is_url, output_path, require_place, stage_in, stage_out
from virnuc_core.results.aggregate import aggregate as merge_shards
from virnuc_core.results.aggregate import wait_for_shard
from virnuc_core.results.run_json import RunAs, RunReport, write_report
from virnuc_core.results.run_opening import (
    is_embeddings_file,
    open_evaluation,
    open_run_folder,
    require_head_place,
    require_no_input,
    require_replaceable,
)
from virnuc_core.retries import retrying, translate_os_errors
from virnuc_core.run_folder import EMBED_SUFFIX, EVALUATED_RUN, RunFolder, run_folder_of
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import store_sequences
from virnuc_core.settings import RunConfig, TrainerSettings
from virnuc_core.specs import Alphabet, chunks_in_words

if TYPE_CHECKING:  # what only the last steps or a training need is imported by these
    from virnuc_core.results.tables import TableCounts
    from virnuc_core.training.evaluation import Evaluation
    from virnuc_core.training.heads import FittedHead, Labelled, RecordSplit
    from virnuc_core.training.labels import LabelledFiles

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Lanes(Protocol):
    """Where a run is planned and its shards are computed."""

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Creates the plan, or verifies that the existing one is of the same run."""

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards; returns when all are done."""


def _log_step(name: str) -> None:
    _log.info("stage: %s", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Calls the steps of one attempt at a run and times them; a subclass may call them in another way.

    Attributes:
        on_step: called with the name of each step before it starts.
        run_as: "flow" within Prefect.
        labels: what else to record of the attempt, by name.
        links: other places to view the run.
        id: of this attempt.
        started: start of this attempt, in Unix seconds.
        seconds: wall time of each finished step, in order.
    """

    on_step: Callable[[str], None] = _log_step
    run_as: RunAs = "process"
    labels: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.time)
    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a step, which finds finished work on disk, until it succeeds or fails for good."""
        return self._timed(step.__name__, lambda: step(*args, **kwargs), repeats=True)

    def once(self, name: str, work: Callable[[], R]) -> R:
        """Calls what lanes do: they repeat their own failed work."""
        return self._timed(name, work, repeats=False)

    def call(self, name: str, work: Callable[[], R], *, repeats: bool) -> R:
        """Calls a step in this thread."""
        return retrying(name, work) if repeats else work()

    def _timed(self, name: str, work: Callable[[], R], *, repeats: bool) -> R:
        self.on_step(name)
        begin = time.monotonic()
        result = self.call(name, work, repeats=repeats)
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begin, 3)
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A finished training, and the run that computed its vectors."""

    run: RunReport
    labelled: "Labelled"
    split: "RecordSplit"
    settings: TrainerSettings
    head: "FittedHead"


def predict(
    inputs: Sequence[str],
    out: str,
    config: RunConfig,
    lanes: Lanes,
    *,
    force: bool = False,
    steps: Steps | None = None,
) -> RunReport:
    """Classifies contigs as viral or not; resumes a run in `out` unless `force` discards it.

    Args:
        inputs: FASTA or FASTQ files of DNA; paths or URLs.
        out: folder for the results; a path, or a URL that they are copied to.
        config: models, head and how to run them.
        lanes: where to compute.
        force: keep nothing of an earlier run.
        steps: calls the steps.

    Raises:
        VirnucError: any failure; the message says what, where, and what to do.
    """
    steps = steps or Steps()
    with _opened(output_path(out), inputs, force=force) as folder:
        files = _local(inputs, steps)
        steps(index, folder, files, config)
        plan = _plan(folder, config, "predict", lanes, steps)
        if is_url(out):
            steps(claim, out, plan, force=force)
        reports, work = _compute_and_merge(folder, folder.embeddings, lanes, steps)
        counts = steps(classify, folder)
        report = _report(steps, plan, out, reports, work, counts)
        steps(publish, folder, report)
        if is_url(out):
            steps(deliver, out, folder)
    return report


def embed(
    inputs: Sequence[str],
    out: str,
    config: RunConfig,
    lanes: Lanes,
    *,
    force: bool = False,
    steps: Steps | None = None,
) -> RunReport:
    """Writes one mean vector for each sequence; as `predict`, but `out` is the embeddings file."""
    steps, path = steps or Steps(), output_path(out)
    require_no_input(path, inputs)
    require_replaceable(path, is_embeddings_file, "embeddings file", force=force)
    with _opened(run_folder_of(path), inputs, force=force) as folder:
        if force:
            path.resolve().unlink(missing_ok=True)
        files = _local(inputs, steps)
        steps(index, folder, files, config)
        plan = _plan(folder, config, "embed", lanes, steps)
        if is_url(out):
            steps(claim, out, plan, force=force)
        reports, work = _compute_and_merge(folder, path, lanes, steps)
        report = _report(steps, plan, out, reports, work)
        steps(publish, folder, report)
        if is_url(out):
            steps(deliver, out, folder)
    return report


def embed_vectors(
    sequences: Sequence[bytes], root: Path, config: RunConfig, lanes: Lanes
) -> npt.NDArray[np.float32]:
    """Vectors (n, D) of usable, clean sequences by one model, in their order, from the shards of a run in a new folder.

    Raises:
        VirnucError: as `predict`.
    """
    steps = Steps()
    with _opened(root, (), force=False) as folder:
        steps(store_sequences, sequences, folder.frames, _alphabet_of(config))
        plan = _plan(folder, config, "embed", lanes, steps)
        _compute(folder, lanes, steps)
        results = [result for _, result in iter_shard_results(folder, plan)]
    return np.concatenate([result.dna if result.protein is None else result.protein for result in results])


def train(
    files: "LabelledFiles",
    out: str,
    config: RunConfig,
    settings: TrainerSettings,
    lanes: Lanes,
    *,
    groups: str | None = None,
    force: bool = False,
    steps: Steps | None = None,
) -> Training:
    """Trains a head for the vectors of two models, in the run folder beside it.

    Args:
        files: labelled sequences; paths or URLs.
        out: file of the head.
        config: the models to embed with.
        settings: how the head is fitted.
        lanes: where to compute.
        groups: TSV of records and the groups to be kept together in the split.
        force: keep nothing of an earlier run.
        steps: calls the steps.

    Raises:
        VirnucError: any failure; the message says what, where, and what to do.
    """
    steps, head = steps or Steps(), Path(out)
    read = [path for path in (*files.paths, *filter(None, [groups])) if not is_url(path)]
    require_head_place(head, read, force=force)
    with _opened(run_folder_of(head), read, force=force) as folder:
        if force:
            head.resolve().unlink(missing_ok=True)
        if any(map(is_url, files.paths)):
            files = files.replaced(lambda names: _local(names, steps))
        labelled = steps(label, files, folder, groups)
        steps(index, folder, labelled.paths, config)
        split = steps(divide, folder, labelled, settings)
        plan = _plan(folder, config, "train", lanes, steps)
        reports = _compute(folder, lanes, steps)
        fitted = steps(fit, folder, labelled, split, settings, head)
        report = _report(steps, plan, out, reports, fitted.work, warnings=fitted.warnings)
        steps(publish, folder, report)
    return Training(run=report, labelled=labelled, split=split, settings=settings, head=fitted)


def evaluate(
    files: "LabelledFiles",
    out: str,
    config: RunConfig,
    lanes: Lanes,
    *,
    force: bool = False,
    steps: Steps | None = None,
) -> "Evaluation":
    """Measures a head on labelled sequences; as `predict`, whose run is in the folder `run` of `out`."""
    steps, root = steps or Steps(), Path(out)
    with translate_os_errors(), open_evaluation(root, files.paths):
        labelled = steps(label, files, RunFolder(root), kinship=False)
        run = predict(labelled.paths, str(root / EVALUATED_RUN), config, lanes, force=force, steps=steps)
        return steps(measure, root, run, labelled)


def fetch(inputs: Sequence[str]) -> list[str]:
    """Copies inputs that are given as URLs to the staging folder; returns the paths of all."""
    return [str(stage_in(name)) if is_url(name) else name for name in inputs]


def claim(out: str, plan: RunPlan, *, force: bool) -> None:
    """Checks before the computation that the URL of the output can be written and holds no other run."""
    require_place(_report_place(out, plan), plan.fingerprint, force=force)


def label(
    files: "LabelledFiles", folder: RunFolder, groups: str | None = None, *, kinship: bool = True
) -> "Labelled":
    """Reads the labelled records."""
    from virnuc_core.training.heads import label_records

    return label_records(files, folder, groups, kinship=kinship)


def index(folder: RunFolder, inputs: Sequence[str], config: RunConfig) -> None:
    """Builds the frame store, or reuses that of the same files and settings."""
    chunk_rule, frames = chunks_of(config)
    if config.chunk_length == "auto":
        _log.info("chunk length: %s (from the head)", chunks_in_words(chunk_rule))
    index_inputs(folder, list(inputs), chunk_rule, _alphabet_of(config), frames, config.min_length)


def divide(folder: RunFolder, labelled: "Labelled", settings: TrainerSettings) -> "RecordSplit":
    """Splits the records before any computation."""
    from virnuc_core.training.heads import split_labelled

    return split_labelled(folder, labelled.table, settings)


def validate(folder: RunFolder) -> tuple[int, ...]:
    """Verifies identity, rows and checksums of every shard; returns those to be computed again, which it has set aside."""
    plan = read_plan(folder.plan)
    remove_shard_temporaries(folder, range(len(plan.shards)))  # of killed lanes
    return pending_shards(folder, plan)


def aggregate(folder: RunFolder, out: Path, all_committed: threading.Event | None = None) -> ShardCounters:
    """Verifies the shards and merges them into one file in input order; waits for them until `all_committed` is set."""
    plan, store = read_plan(folder.plan), FrameStore.open(folder.frames)
    counters = merge_shards(folder, plan, store, out, all_committed)
    remove_shard_temporaries(folder, range(len(plan.shards)))  # of killed lanes
    return counters


def classify(folder: RunFolder) -> "TableCounts":
    """Classifies chunks and contigs from the scores, and writes the tables."""
    from virnuc_core.results.tables import write_tables

    plan, store = read_plan(folder.plan), FrameStore.open(folder.frames)
    assert plan.head is not None
    return write_tables(
        folder, store, load_planned_head(plan.head), plan.calls, calibrated=plan.head.calibrated
    )


def fit(
    folder: RunFolder, labelled: "Labelled", split: "RecordSplit", settings: TrainerSettings, out: Path
) -> "FittedHead":
    """Fits, calibrates, writes and evaluates the head."""
    from virnuc_core.training.heads import fit_head

    return fit_head(folder, labelled.table, split, settings, out)


def measure(root: Path, run: RunReport, labelled: "Labelled") -> "Evaluation":
    """Compares the calls of an evaluated run with the labels, and writes evaluation.json."""
    from virnuc_core.training.evaluation import measure_run

    return measure_run(root, run, labelled.table)


def publish(folder: RunFolder, report: RunReport) -> None:
    """Writes virnuc_mqc.json, report.html and run.json."""
    write_report(folder.report, report)


def deliver(out: str, folder: RunFolder) -> None:
    """Copies the results to the URL of the output, run.json last."""
    plan = read_plan(folder.plan)
    place = _report_place(out, plan)
    written = [path for path in (folder.plan, *folder.results) if path.exists() and path != folder.report]
    files = {path: f"{place}/{path.name}" for path in written}
    if plan.kind == "embed":
        files[output_path(out)] = out
    stage_out(files, folder.report, f"{place}/{folder.report.name}")


def _report_place(out: str, plan: RunPlan) -> str:
    return f"{out}{EMBED_SUFFIX if plan.kind == 'embed' else ''}".rstrip("/")


def _alphabet_of(config: RunConfig) -> Alphabet:
    return "protein" if config.dnabert_model is None else "dna"


def _local(inputs: Sequence[str], steps: Steps) -> Sequence[str]:
    return steps(fetch, inputs) if any(map(is_url, inputs)) else inputs


def _plan(folder: RunFolder, config: RunConfig, kind: Kind, lanes: Lanes, steps: Steps) -> RunPlan:
    plan = steps.once("plan", lambda: lanes.plan(folder, config, kind))
    plan.require_own_series()
    return plan


def _compute(folder: RunFolder, lanes: Lanes, steps: Steps) -> list[LaneReport]:
    """Computes and verifies the shards."""
    reports = steps.once("embed", lambda: lanes.compute(folder))
    return reports + _repair(folder, lanes, steps)


def _repair(folder: RunFolder, lanes: Lanes, steps: Steps) -> list[LaneReport]:
    """Computes the shards that are damaged once more."""
    if not steps(validate, folder):
        return []
    reports = steps.once("embed", lambda: lanes.compute(folder))
    if damaged := steps(validate, folder):
        raise DamagedFileError(
            f"shard {folder.shard(damaged[0])} is corrupt again: check the disk of {folder.shards}."
        )
    return reports


def _compute_and_merge(
    folder: RunFolder, out: Path, lanes: Lanes, steps: Steps
) -> tuple[list[LaneReport], ShardCounters]:
    """Computes the shards; committed ones are verified and merged meanwhile, all of them again if one is damaged."""
    ended = threading.Event()

    def merge() -> ShardCounters:
        wait_for_shard(folder, 0, ended)  # the imports of lanes come first
        for name in ("tables", "report.page"):  # slow imports, for the steps that follow
            import_module(f"virnuc_core.results.{name}")
        return aggregate(folder, out, ended)

    with ThreadPoolExecutor(1, thread_name_prefix="merge") as pool:
        merging = pool.submit(merge)
        try:
            reports = steps.once("embed", lambda: lanes.compute(folder))
        finally:
            ended.set()
        work = steps.once("aggregate", lambda: _unless_failed(merging))
    if work is None:
        reports += _repair(folder, lanes, steps)
        work = steps(aggregate, folder, out)
    return reports, work


def _unless_failed(merging: Future[ShardCounters]) -> ShardCounters | None:
    if error := merging.exception():
        _log.warning("%s The shards are verified and merged again.", error)
        return None
    return merging.result()


def _report(
    steps: Steps,
    plan: RunPlan,
    out: str,
    lanes: Sequence[LaneReport],
    work: ShardCounters,
    counts: "TableCounts | None" = None,
    warnings: tuple[str, ...] = (),
) -> RunReport:
    return RunReport(
        plan=plan,
        out=str(output_path(out)),
        counts=counts,
        work=work,
        lanes=lanes,
        seconds=dict(steps.seconds),
        run_as=steps.run_as,
        id=steps.id,
        started=steps.started,
        labels=steps.labels,
        warnings=warnings,
        links={**steps.links, **({"results": without_secrets(out)} if is_url(out) else {})},
    )


@contextmanager
def _opened(root: Path, inputs: Sequence[str], *, force: bool) -> Iterator[RunFolder]:
    with translate_os_errors(), open_run_folder(root, force=force, inputs=inputs) as folder:
        yield folder
