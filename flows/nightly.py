"""The nightly flow: each new sequence file of an inbox becomes a predict run."""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect import flow, tags
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.utilities.urls import url_for
from tasks.pool_runs import PoolRun, PoolRuns

from flows import RUNS_POOL
from flows.outputs import require_absolute
from flows.pool import require_lasting_server
from flows.predict import predict
from tasks.artifacts import RUN_TAG, attach_api_log_handler
from tasks.nightly import (
    DIGESTS_NAME,
    Computed,
    DigestCache,
    NewFile,
    NightlyBatch,
    NightlyReport,
    claim_results,
    iter_inbox,
    make_writable,
    publish_nightly,
)
from tasks.publishing import run_tags
from tasks.run_entries import Entry, Value
from tasks.tracking import start_tracking, track
from virnuc_core import errors
from virnuc_core.errors import LaneError, VirnucError
from virnuc_core.settings import (
    PREDICT_DEFAULTS,
    Count,
    LaneMode,
    LaneSettings,
    PositiveTime,
    PredictSettings,
    Priority,
    Project,
    SettleTime,
)

PREDICT_DEPLOYMENT: Final = "predict/on-demand"
# Name of the final state of a nightly run, of type COMPLETED, that automations.yaml waits for.
FILES_REJECTED: Final = "FilesRejected"

_log = logging.getLogger(__name__)


def nightly_name() -> str:
    """Inbox (last two parts of a glob) and day: "nightly inbox 2026-01-31"."""
    inbox = Path(flow_run.parameters["inbox"])
    shown = inbox.name if inbox.is_dir() else "/".join(inbox.parts[-2:])
    return f"nightly {shown} {date.today()}"


@flow(name="predict", flow_run_name=nightly_name, persist_result=False)
def nightly(
    inbox: str,
    out: str,
    settings: PredictSettings = PREDICT_DEFAULTS,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    priority: Priority = "normal",
    project: Project = "",
    files_at_once: Count = 8,
    settle_seconds: SettleTime = 60.0,
) -> State[NightlyReport]:
    """Calls the contigs of every file in an inbox whose bytes have no results yet.

    A file that is still being written waits for the next nightly run, one that cannot be used is moved aside with
    its reason, and a run that did not finish is resumed by the next one. Nightly runs over the same results share the
    work: each content is computed by one of them, and the others wait for it.

    Args:
        inbox: a folder, or a glob such as `/data/*/contigs.fa.gz`.
        out: folder of the results, one folder a file: NAME-HASH.
        settings: models and how to run them.
        mode: "local": the files one after another, in this process; "pool": runs for the workers of the work pools.
        lane_minutes: about how long a lane works, in pool mode.
        priority: queue of the files' runs and of their lanes, in pool mode.
        project: what the GPU hours count for.
        files_at_once: number of files whose runs wait or work at a time, in pool mode.
        settle_seconds: how long nobody must have written to a file.

    Raises:
        VirnucError: some files failed and wait for the next nightly run; the others are done.
    """
    attach_api_log_handler()
    require_absolute(inbox, out)
    results = make_writable(Path(out).absolute())
    where = LaneSettings(mode=mode, lane_minutes=lane_minutes, priority=priority, project=project)
    parameters = {"settings": settings, **dict(where)}
    if mode == "pool":
        require_lasting_server()
        compute_files = PoolFiles(results, parameters, files_at_once).compute
    else:
        compute_files = LocalFiles(parameters).compute
    params: dict[str, Value] = {
        **{"inbox": inbox, "out": out, "files_at_once": files_at_once, "settle_seconds": settle_seconds},
        **settings.params,
        **where.params,
    }
    begin = time.time()
    files = sorted(iter_inbox(str(Path(inbox).absolute())), key=lambda file: file.mtime_ns)
    with DigestCache(results / DIGESTS_NAME) as digests:
        batch = NightlyBatch(results, digests, compute_files, settle_seconds)
        report = NightlyReport(inbox=inbox, out=results, outcomes=batch.process(files))
    publish_nightly(report)
    entry = _entry_of(report, begin, params, run_tags(results, project))
    track(start_tracking("", {}), lambda: entry, results / "*")
    if report.counts["failed"]:
        raise VirnucError(
            f"{report.summary}. {report.failures} They are tried again by the next nightly run."
        )
    name = FILES_REJECTED if report.counts["rejected"] else None
    return Completed(name=name, message=report.summary, data=report)


def _entry_of(
    report: NightlyReport, begin: float, params: Mapping[str, Value], tags: Mapping[str, str]
) -> Entry:
    return Entry(
        id=str(flow_run.id),
        name=flow_run.name,
        started=begin,
        finished=time.time(),
        params=params,
        metrics=[(name, float(value), 0) for name, value in report.metrics.items()],
        tags=tags,
        note=report.summary,
        tables={"files": report.rows} if report.rows else None,
    )


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Runs in this process, one after another, with these parameters of `predict`."""

    parameters: Mapping[str, Any]

    def compute(self, files: Iterator[NewFile]) -> Iterator[tuple[NewFile, Computed]]:
        """Computes the files; those that another nightly run is computing come last."""
        begun_by_others = []
        for file in files:
            with claim_results(file.results) as is_claimed:
                if is_claimed:
                    yield file, self._run(file)
                else:
                    begun_by_others.append(file)
        for file in begun_by_others:
            with claim_results(file.results, wait=True):
                yield file, self._run(file)

    def _run(self, file: NewFile) -> Computed:
        if file.has_results:
            return Computed(is_own=False)
        begin = time.monotonic()
        with tags(RUN_TAG):
            # The state, and not the result: an error ends this run alone.
            state: State[Any] = predict(
                [str(file.path)], str(file.results), **self.parameters, return_state=True
            )
        error = None if state.is_completed() else state.result(raise_on_failure=False)
        return Computed(error, time.monotonic() - begin, _page(state.state_details.flow_run_id))


class PoolFiles:
    """Runs of the deployment predict/on-demand with these parameters, at most `files_at_once` at a time.

    The runs of a content into `out` with the same settings have a tag, whichever nightly run began them. While the
    newest one waits or works, it is waited for. Once it has ended, before this nightly run or by a crash, there is
    another one, whose number is in its idempotency key: nightly runs that begin it at once get the same run.
    """

    def __init__(self, out: Path, parameters: Mapping[str, Any], files_at_once: int) -> None:
        settings: PredictSettings = parameters["settings"]
        self._parameters = {**parameters, "settings": settings.model_dump(mode="json")}
        self._common = f"{out}\n{settings.model_dump_json()}"
        self._files_at_once = files_at_once
        self._begin = datetime.now(UTC)
        self._own_tag = f"virnuc-night:{flow_run.id}"
        self._joined: set[UUID] = set()  # runs that other nightly runs began

    def compute(self, files: Iterator[NewFile]) -> Iterator[tuple[NewFile, Computed]]:
        """Yields each file when its run has ended; an error cancels the runs of this nightly run."""
        at_work: dict[UUID, NewFile] = {}
        crashes = Counter[str]()
        with PoolRuns(RUNS_POOL, PREDICT_DEPLOYMENT, self._parameters["priority"]) as runs:
            try:
                while True:
                    for file in islice(files, self._files_at_once - len(at_work)):
                        at_work[self._begin_or_join(runs, file)] = file
                    if not at_work:
                        return
                    for run_id, state in runs.poll().items():
                        file = at_work.pop(run_id)
                        run = runs.find_newest(self._tag(file))
                        is_own = run is None or self._own_tag in run.tags
                        crashes[file.sha256] += state.is_crashed()
                        is_lost = state.is_crashed() or (state.is_cancelled() and not is_own)
                        # Runs of a file that may crash in one night, as when their host dies.
                        if is_lost and crashes[file.sha256] < 3:
                            _log.warning("%s: another run is begun: %s", file.path.name, state)
                            at_work[self._begin_or_join(runs, file)] = file
                        else:
                            seconds = run.total_run_time.total_seconds() if run else 0.0
                            yield file, Computed(_error_of(state), seconds, _page(run_id), is_own)
            except BaseException:
                runs.leave(self._joined)
                raise

    def _tag(self, file: NewFile) -> str:
        digest = hashlib.sha256(f"{self._common}\n{file.sha256}".encode()).hexdigest()
        return f"virnuc-file:{digest[:16]}"

    def _begin_or_join(self, runs: PoolRuns, file: NewFile) -> UUID:
        tag = self._tag(file)
        newest = runs.find_newest(tag)
        if newest is not None and not self._is_over(newest):
            runs.follow(newest)
            if self._own_tag not in newest.tags:
                self._joined.add(newest.id)
            return newest.id
        number = 1 + int((newest.idempotency_key or "-0").rpartition("-")[2]) if newest else 1
        run = PoolRun(
            key=f"{tag}-{number}",
            name=f"predict {file.path.name}",
            parameters={**self._parameters, "inputs": [str(file.path)], "out": str(file.results)},
            tags=(RUN_TAG, tag, self._own_tag),
        )
        return runs.submit([run])[0]

    def _is_over(self, run: FlowRun) -> bool:
        """Whether a run is none that this nightly run may share."""
        state = run.state
        if state is None or not state.is_final():
            return False
        return state.is_crashed() or state.is_cancelled() or state.timestamp < self._begin


def _page(run_id: UUID | None) -> str:
    return (url_for("flow-run", obj_id=run_id) if run_id else None) or ""


def _error_of(state: State[Any]) -> VirnucError | None:
    """The error of a run in another process, from the message of its state."""
    if state.is_completed():
        return None
    found = re.search(r"exception: (\w+): (.*)", state.message or "", re.DOTALL)
    if found is None:
        return LaneError(f"its run ended in state {state.name}: {state.message}")
    kind = getattr(errors, found[1], None)
    if isinstance(kind, type) and issubclass(kind, VirnucError):
        return kind(found[2])
    return VirnucError(f"{found[1]}: {found[2]}")
