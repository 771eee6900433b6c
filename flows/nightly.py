"""The nightly flow: each new sequence file of an inbox becomes a predict run."""

import logging
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.utilities.urls import url_for
from pydantic import Field, FiniteFloat

from flows.outputs import require_absolute
from flows.predict import predict
from tasks.artifacts import attach_api_log_handler
from tasks.nightly import (
    DIGESTS_NAME,
    DigestCache,
    NightlyBatch,
    NightlyReport,
    PredictResult,
    iter_inbox,
    lock_results,
    publish_nightly,
)
from tasks.publishing import prefect_tags
from tasks.tracking import Value, tracked_run
from virnuc_core.errors import VirnucError
from virnuc_core.settings import PREDICT_DEFAULTS, LaneMode, PositiveTime, PredictSettings

SettleTime = Annotated[FiniteFloat, Field(ge=0)]

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
    settle_seconds: SettleTime = 60.0,
) -> State[NightlyReport]:
    """Calls the contigs of every file in an inbox whose bytes have no results yet.

    A file that is still being written waits for the next nightly run, one that cannot be used is moved aside with
    its reason, and a run that did not finish is resumed by the next one. A second nightly run over the same results
    ends at once.

    Args:
        inbox: a folder, or a glob such as `/data/*/contigs.fa.gz`.
        out: folder of the results, one folder a file: NAME-HASH.
        settings: models and how to run them.
        mode: where the lanes run.
        lane_minutes: about how long a lane works, in pool mode.
        settle_seconds: how long nobody must have written to a file.

    Raises:
        VirnucError: some files failed and wait for the next nightly run; the others are done.
    """
    attach_api_log_handler()
    require_absolute(inbox, out)
    results = Path(out).absolute()
    params: dict[str, Value] = {
        "inbox": inbox,
        "out": out,
        "mode": mode,
        "lane_minutes": lane_minutes,
        "settle_seconds": settle_seconds,
        **settings.params,
    }

    with lock_results(results) as is_alone:
        if not is_alone:
            message = f"another nightly run is at work in {results}: this one leaves everything to it"
            _log.warning(message)
            return Completed(message=message, data=NightlyReport(inbox=inbox, out=results, outcomes=()))
        with tracked_run(flow_run.name, params, prefect_tags(results)) as tracked:
            files = sorted(iter_inbox(str(Path(inbox).absolute())), key=lambda file: file.mtime_ns)
            with DigestCache(results / DIGESTS_NAME) as digests:
                predict_file = partial(_predict_file, settings=settings, mode=mode, lane_minutes=lane_minutes)
                batch = NightlyBatch(results, digests, predict_file, settle_seconds)
                report = NightlyReport(inbox=inbox, out=results, outcomes=batch.process(files))
            publish_nightly(report, tracked)
            if report.counts["failed"]:
                raise VirnucError(
                    f"{report.summary}. {report.failures} They are tried again by the next nightly run."
                )
    return Completed(message=report.summary, data=report)


def _predict_file(path: Path, out: Path, **settings: Any) -> PredictResult:
    # The state, and not the result: an error ends this run alone.
    state: State[Any] = predict([str(path)], str(out), **settings, return_state=True)
    error = None if state.is_completed() else state.result(raise_on_failure=False)
    run_id = state.state_details.flow_run_id
    link = url_for("flow-run", obj_id=run_id) if run_id else None
    return PredictResult(error=error, link=link or "")
