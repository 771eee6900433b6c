"""The stages of a run in order, shared by the Python API, the flows and the command line."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.plan import Kind, RunPlan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.inference.shard import (
    ShardCounters,
    iter_shard_results,
    remove_shard_temporaries,
    require_all_shards,
)
from virnuc_core.models.catalogue import chunk_rule_of, frames_of
from virnuc_core.plain_text import without_secrets
from virnuc_core.remote import is_url, output_path, require_place, stage_in, stage_out
from virnuc_core.results.aggregate import aggregate as merge_shards
from virnuc_core.results.contig_scores import contig_head_of
from virnuc_core.results.run_json import RunAs, RunReport, write_report
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.results.tables import TableCounts, write_tables
from virnuc_core.retries import translate_os_errors
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Alphabet

if TYPE_CHECKING:  # what only a training needs is imported by its stages
    from virnuc_core.training.heads import FittedHead, HeadSettings, Labelled, RecordSplit
    from virnuc_core.training.labels import LabelledFiles

_log = logging.getLogger(__name__)


class Lanes(Protocol):
    """Where a run is planned and its shards are computed."""

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Creates the plan, or verifies that the existing one is of the same run."""

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards; returns when all are done."""


class Run:
    """State of a run; each stage sets what later ones read.

    Attributes:
        inputs: files to read; those at URLs are replaced by their copies.
        origins: inputs as given, without secrets.
        out: output named in the report: the folder, or the file of an embed run or a head.
        url: where the output is copied to, if it was given as a URL.
        force: results of another run at `url` may be replaced.
        work: counters summed over all shards.
        seconds: wall time of each finished stage, in order.
        links: other places to view the run.
        run_as: "flow" within Prefect.
        id: of this attempt.
        started: start of this attempt, in Unix seconds.
        labels: what else to record of it, by name.
    """

    plan: RunPlan
    work: ShardCounters

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        kind: Kind,
        *,
        lanes: Lanes,
        inputs: Sequence[str] = (),
        out: str | None = None,
        force: bool = False,
    ) -> None:
        self.folder = folder
        self.config = config
        self.kind = kind
        self.lanes = lanes
        self.inputs = list(inputs)
        self.origins = self.inputs
        self.out = str(folder.root if out is None else output_path(out))
        self.url = out if out is not None and is_url(out) else None
        self.force = force
        self.lane_reports: list[LaneReport] = []
        self.counts: TableCounts | None = None
        self.seconds: dict[str, float] = {}
        self.links: Mapping[str, str] = {}
        self.run_as: RunAs = "process"
        self.id = secrets.token_hex(8)
        self.started = time.time()
        self.labels: Mapping[str, str] = {}

    @property
    def report(self) -> RunReport:
        """Report of the run so far."""
        return RunReport(
            plan=self.plan,
            out=self.out,
            counts=self.counts,
            work=self.work,
            lanes=self.lane_reports,
            seconds=self.seconds,
            run_as=self.run_as,
            id=self.id,
            started=self.started,
            labels=self.labels,
            links={**self.links, **({"results": without_secrets(self.url)} if self.url else {})},
        )


class Training(Run):
    """A run that a head is trained on; `groups` is a TSV of records and the groups to be kept together in the split."""

    labelled: "Labelled"
    split: "RecordSplit"
    head: "FittedHead"

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        files: "LabelledFiles",
        *,
        groups: str | None,
        settings: "HeadSettings",
        lanes: Lanes,
        out: str,
    ) -> None:
        super().__init__(folder, config, "train", lanes=lanes, out=out)
        self.files, self.groups, self.settings = files, groups, settings


Stage = Callable[[Any], None]


def fetch(run: Run) -> None:
    """Copies inputs that are given as URLs to the staging folder."""

    def local(names: Sequence[str]) -> list[str]:
        return [str(stage_in(name)) if is_url(name) else name for name in names]

    run.origins = [without_secrets(name) for name in run.inputs]
    run.inputs = local(run.inputs)
    if isinstance(run, Training):
        run.files = run.files.replaced(local)


def claim(run: Run) -> None:
    """Checks before the computation that the URL of the output can be written and holds no other run."""
    require_place(_report_place(run), run.plan.fingerprint, force=run.force)


def deliver(run: Run) -> None:
    """Copies the results to the URL of the output, run.json last."""
    assert run.url is not None
    place, folder = _report_place(run), run.folder
    written = [path for path in (folder.plan, *folder.results) if path.exists() and path != folder.report]
    files = {path: f"{place}/{path.name}" for path in written}
    if run.kind == "embed":
        files[Path(run.out)] = run.url
    stage_out(files, folder.report, f"{place}/{folder.report.name}")


def _report_place(run: Run) -> str:
    return f"{run.url}{EMBED_SUFFIX if run.kind == 'embed' else ''}".rstrip("/")


def with_transfers(run: Run, stages: Sequence[Stage]) -> list[Stage]:
    """Adds the stages that copy inputs and results, for a run with URLs."""
    sources = run.files.paths if isinstance(run, Training) else run.inputs
    stages = [fetch, *stages] if any(map(is_url, sources)) else list(stages)
    if run.url is not None:
        stages.insert(stages.index(embed), claim)
        stages.append(deliver)
    return stages


def label(run: Training) -> None:
    """Reads the labelled records."""
    from virnuc_core.training.heads import label_records

    run.labelled = label_records(run.files, run.folder, run.groups, kinship=True)
    run.inputs = run.origins = run.labelled.paths


def index(run: Run) -> None:
    """Builds the frame store, or reuses that of the same files and settings."""
    config = run.config
    alphabet: Alphabet = "protein" if config.dnabert_model is None else "dna"
    rule = chunk_rule_of(config)
    index_inputs(run.folder, run.inputs, rule, alphabet, frames_of(config), config.min_length)


def divide(run: Training) -> None:
    """Splits the records before any computation."""
    from virnuc_core.training.heads import split_labelled

    run.split = split_labelled(run.folder, run.labelled.table, run.settings)


def plan(run: Run) -> None:
    """Writes the plan, or verifies the existing one."""
    run.plan = run.lanes.plan(run.folder, run.config, run.kind)
    run.plan.require_own_series()


def embed(run: Run) -> None:
    """Computes the missing shards."""
    run.lane_reports = run.lanes.compute(run.folder)


def validate(run: Run) -> None:
    """Verifies that all shards exist, and removes leftovers of killed lanes."""
    require_all_shards(run.folder, run.plan)
    remove_shard_temporaries(run.folder, range(len(run.plan.shards)))


def aggregate(run: Run) -> None:
    """Merges the shards into one file in input order."""
    out = Path(run.out) if run.kind == "embed" else run.folder.embeddings
    run.work = merge_shards(run.folder, run.plan, FrameStore.open(run.folder.frames), out)


def classify(run: Run) -> None:
    """Classifies chunks and contigs from the scores, and writes the tables."""
    plan, store = run.plan, FrameStore.open(run.folder.frames)
    run.counts = write_tables(run.folder, store, plan.threshold, contig_head_of(plan), plan.fdr)


def fit(run: Training) -> None:
    """Fits, calibrates, writes and evaluates the head."""
    from virnuc_core.training.heads import fit_head

    run.head = fit_head(run.folder, run.labelled.table, run.split, run.settings, Path(run.out))
    run.work = run.head.work


def publish(run: Run) -> None:
    """Writes virnuc_mqc.json, report.html and run.json."""
    write_report(run.folder.report, run.report)


PREDICT: Final[Sequence[Stage]] = (index, plan, embed, validate, aggregate, classify, publish)
EMBED: Final[Sequence[Stage]] = (index, plan, embed, validate, aggregate, publish)
TRAIN: Final[Sequence[Stage]] = (label, index, divide, plan, embed, validate, fit, publish)


def run_stages(run: Run, stages: Sequence[Stage], on_stage: Callable[[str], None]) -> None:
    """Runs stages in order, recording wall times; `on_stage` is called with the name of each before it starts."""
    for stage in stages:
        name = stage.__name__
        on_stage(name)
        begin = time.monotonic()
        stage(run)
        run.seconds[name] = round(time.monotonic() - begin, 3)


def predict_run(
    inputs: Sequence[str], out: str, config: RunConfig, lanes: Lanes, *, force: bool = False
) -> RunReport:
    """Classifies contigs of DNA files as viral or not; resumes a run in `out` unless `force` discards it.

    Raises:
        VirnucError: any failure; the message says what, where, and what to do.
    """
    with translate_os_errors(), open_run_folder(output_path(out), force=force, inputs=inputs) as folder:
        run = Run(folder, config, "predict", lanes=lanes, inputs=inputs, out=out, force=force)
        run_stages(run, with_transfers(run, PREDICT), _log_stage)
    return run.report


def embed_run(inputs: Sequence[str], root: Path, config: RunConfig, lanes: Lanes) -> npt.NDArray[np.float32]:
    """Vectors of whole sequences by one model, (n, D) in input order, from the shards of a run in a new folder.

    Raises:
        VirnucError: as `predict_run`.
    """
    with translate_os_errors(), open_run_folder(root, force=False) as folder:
        run = Run(folder, config, "embed", lanes=lanes, inputs=inputs)
        run_stages(run, (index, plan, embed), _log_stage)
        results = [result for _, result in iter_shard_results(folder, run.plan)]
    return np.concatenate([result.dna if result.protein is None else result.protein for result in results])


def _log_stage(name: str) -> None:
    _log.info("stage: %s", name)
