"""The nightly flow: computes the files of an inbox that have no results yet."""

import itertools
import logging
import secrets
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect import Task, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State
from prefect.deployments import run_deployment
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.utilities.urls import url_for

from flows.files import batch_name, predict_files, title_of
from flows.lanes import HELD
from flows.on_demand import predict, run_flow
from flows.pool import cancel_children, for_worker, pool_device
from flows.recording import choose_lanes, require_absolute
from tasks.artifacts import RUN_TAG, begin_flow
from tasks.inbox import Computed, NewFile, Night, NightlyReport, settings_digest
from tasks.publishing import run_tags
from tasks.run_entries import Entry
from tasks.server import read_all
from tasks.stages import as_task
from tasks.tracking import start_tracking, track
from virnuc_core.errors import DamagedFileError, LaneError, MismatchError, VirnucError, is_retryable
from virnuc_core.inference.events import LaneFailed
from virnuc_core.inference.lane_journal import JournalTail, error_of
from virnuc_core.results.run_opening import locking
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import (
    PREDICT_DEFAULTS,
    Count,
    LaneMode,
    LaneSettings,
    PositiveTime,
    PredictSettings,
    Priority,
    RunConfig,
    SettleTime,
    predict_config,
)

# Name of the final state of a night, of type COMPLETED, that alarms.yaml waits for.
FILES_REJECTED: Final = "FilesRejected"
SMALL_BYTES: Final = 1_000_000  # up to which a run of its own would take longer than the file
SMALL_AT_ONCE: Final = 40

_log = logging.getLogger(__name__)


def nightly_name() -> str:
    """Inbox (last two parts of a glob) and day: "nightly inbox 2026-01-31"."""
    inbox = Path(flow_run.parameters["inbox"])
    shown = inbox.name if inbox.is_dir() else "/".join(inbox.parts[-2:])
    return f"nightly {shown} {date.today()}"


@run_flow("nightly", nightly_name)
def nightly(
    inbox: str,
    out: str,
    settings: PredictSettings = PREDICT_DEFAULTS,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    files_at_once: Count = 8,
    settle_seconds: SettleTime = 60.0,
) -> State[NightlyReport]:
    """Classifies every file in an inbox whose content has no results with these settings yet.

    A file that is still being written waits for the next night. An unusable file is moved to `rejected` with the reason.
    The next night resumes unfinished runs.

    Args:
        inbox: a folder or a glob such as `/data/*/contigs.fa.gz`.
        out: folder for the results, with one folder NAME-HASH per file.
        settings: models and how to run them.
        mode: "local": one file after another on this machine; "pool": by the workers of the work pools.
        lane_minutes: estimated minutes of work per lane, in pool mode.
        priority: queue of the lanes and of small files, in pool mode.
        files_at_once: number of large files or batches of small ones submitted at a time, in pool mode.
        settle_seconds: seconds since the last write after which a file counts as complete.

    Raises:
        VirnucError: some files failed and wait for the next night; the others are done.
    """
    begin_flow()
    require_absolute(inbox, out)
    begin, results = time.time(), Path(out).absolute()
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority)
    choose_lanes(where, settings.devices)  # fails now instead of for each file
    start_tracking(flow_run.id, run_tags(results))
    with locking(results), _working(settings, where, results) as work:
        night = Night(str(Path(inbox).absolute()), results, settings_digest(work.config), settle_seconds)
        found = as_task("scan", night.scan)(return_state=True)
        ended = []
        with closing(work.compute(found, files_at_once)) as states:
            for state in states:
                ended.append(state)
                for computed in state.result():
                    night.settle(computed)
    report = NightlyReport(inbox=inbox, out=results, outcomes=list(night.outcomes.values()))
    as_task("report", report.publish)(wait_for=[found, *ended])
    track(partial(_entry_of, report, begin, settings, run_tags(results)), results / "*")
    if report.metrics["files_failed"]:
        raise VirnucError(f"{report.summary}. {report.failures} The next nightly run retries them.")
    name = FILES_REJECTED if report.metrics["files_rejected"] else None
    return Completed(name=name, message=report.summary, data=report)


def _entry_of(
    report: NightlyReport, begin: float, settings: PredictSettings, own_tags: Mapping[str, str]
) -> Entry:
    parameters = {name: value for name, value in flow_run.parameters.items() if name != "settings"}
    return Entry(
        id=flow_run.id,
        name=flow_run.name,
        started=begin,
        finished=time.time(),
        params={**parameters, **settings.params},
        metrics=[(name, float(value), 0) for name, value in report.metrics.items()],
        tags=own_tags,
        note=report.summary,
        tables={"files": report.rows} if report.rows else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """How files are computed; `journals` is a folder for errors in batches."""

    settings: PredictSettings
    config: RunConfig
    where: LaneSettings
    journals: Path

    def compute(self, found: State[list[NewFile]], at_once: int) -> Generator[State[list[Computed]]]:
        """Computes batches of small files, and then large ones; in mode pool side by side."""
        small = [new for new in found.result() if new.file.size <= SMALL_BYTES]
        tasks = []
        for begin in range(0, len(small), SMALL_AT_ONCE):
            files = small[begin : begin + SMALL_AT_ONCE]
            name = title_of([new.file.path.name for new in files])
            tasks.append(as_task(name, partial(self._predict_files, files)))
        large = [new for new in found.result() if new.file.size > SMALL_BYTES]
        tasks += [as_task(new.file.path.name, partial(self._predict, new)) for new in large]

        def call(task: Task[[], list[Computed]]) -> State[list[Computed]]:
            return task(return_state=True, wait_for=[found])

        if self.where.mode == "local":
            yield from map(call, tasks)
            return
        with ThreadPoolExecutor(at_once, thread_name_prefix="night") as threads:
            futures = [threads.submit(copy_context().run, call, task) for task in tasks]
            try:
                yield from (future.result() for future in as_completed(futures))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                cancel_children()
                raise

    def _predict(self, new: NewFile) -> list[Computed]:
        """Starts an unfinished run over that cannot be continued."""
        path, results, options = str(new.file.path), str(new.results), dict(self.where)
        for force in (False, True):
            with tags(RUN_TAG):  # not around tasks, which would ask the server about a limit for it
                state: State[Any] = predict(
                    [path], results, self.settings, force, **options, return_state=True
                )
            error = None if state.is_completed() else state.result(raise_on_failure=False)
            if not isinstance(error, MismatchError | DamagedFileError):
                break
            _log.warning("%s is computed again: %s", path, error)
        return [Computed(new, error, _page(state.state_details.flow_run_id))]

    def _predict_files(self, files: Sequence[NewFile]) -> list[Computed]:
        """Begins another run for what is left, as when a run died or its device failed."""
        computed: dict[Path, Computed] = {}
        num_failed = 0
        for attempt in itertools.count():
            journal = self.journals / f"{files[0].results.name}-{attempt}.jsonl"
            state, page = self._run_batch(files, journal)
            events = JournalTail(journal).read_new()
            failures = {event.lane: error_of(event) for event in events if isinstance(event, LaneFailed)}
            over = LaneError, f"the run of its batch ended as {state.name}: {state.message}"
            for number, new in enumerate(files):
                is_done = number not in failures and RunFolder(new.results).report.exists()
                kind, text = failures.get(number, over)
                computed[new.results] = Computed(new, None if is_done else kind(text), page)
            files = [new for new, error, _ in computed.values() if error and is_retryable(error)]
            num_failed += state.name != HELD
            if not files or state.is_cancelled() or num_failed == 3:
                break
        return list(computed.values())

    def _run_batch(self, batch: Sequence[NewFile], journal: Path) -> tuple[State[Any], str]:
        files = {str(new.file.path): str(new.results) for new in batch}
        if self.where.mode == "local":
            state: State[Any] = predict_files(files, self.config, str(journal), return_state=True)
            return state, _page(state.state_details.flow_run_id)
        config = self.config.model_dump(mode="json")
        run = run_deployment(
            f"{predict_files.name}/{'cpu' if self.config.devices == ('cpu',) else 'gpu'}",
            parameters={"files": files, "config": config, "journal": str(journal)},
            flow_run_name=batch_name(files),
            work_queue_name=self.where.priority,
            timeout=0,
        )
        assert isinstance(run, FlowRun)
        with get_client(sync_client=True) as client:
            while not ((now := client.read_flow_run(run.id).state) and (now.is_final() or now.name == HELD)):
                time.sleep(2)
        return now, _page(run.id)


@contextmanager
def _working(settings: PredictSettings, where: LaneSettings, results: Path) -> Iterator[_Work]:
    config = for_worker(predict_config(settings))
    if where.mode == "pool":
        batches = {
            "flow_filter": FlowFilter.model_validate({"name": {"any_": [predict_files.name]}}),
            "flow_run_filter": FlowRunFilter.model_validate(
                {"state": {"type": {"not_any_": list(TERMINAL_STATES)}}}
            ),
        }
        with get_client(sync_client=True) as client:
            device = pool_device(client, settings.devices[0])
            # A night whose process was killed may have left batches at the server.
            while any(
                Path(run.parameters["journal"]).parent.parent == results
                for run in read_all(client.read_flow_runs, **batches)
            ):
                time.sleep(5)
        config = config.model_copy(update={"devices": ("cpu",) if device == "cpu" else ("0",)})
    for left in results.glob(".virnuc-night-*"):
        shutil.rmtree(left, ignore_errors=True)
    journals = results / f".virnuc-night-{secrets.token_hex(8)}"
    journals.mkdir()
    try:
        yield _Work(settings=settings, config=config, where=where, journals=journals)
    finally:
        shutil.rmtree(journals, ignore_errors=True)


def _page(run_id: UUID | None) -> str:
    return (url_for("flow-run", obj_id=run_id) if run_id else None) or ""
