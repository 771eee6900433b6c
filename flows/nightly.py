"""Every night: each new sequence file of an inbox becomes a run of `predict`."""

import logging
from datetime import date
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
from tasks.nightly import DIGESTS_NAME, Attempt, Night, PredictFile, iter_inbox, lock_results, open_digests
from tasks.pages.nightly_page import NightReport, publish_night
from tasks.publishing import prefect_tags
from tasks.tracking import Value, tracked_run
from virnuc_core.errors import VirnucError
from virnuc_core.settings import PREDICT_DEFAULTS, LaneMode, PositiveTime, PredictSettings

SettleTime = Annotated[FiniteFloat, Field(ge=0)]

_log = logging.getLogger(__name__)


def night_name() -> str:
    """The inbox, of a glob its last two parts, and the day: "nightly inbox 2026-01-31"."""
    inbox = Path(flow_run.parameters["inbox"])
    shown = inbox.name if inbox.is_dir() else "/".join(inbox.parts[-2:])
    return f"nightly {shown} {date.today()}"


@flow(name="predict", flow_run_name=night_name, persist_result=False)
def nightly(
    inbox: str,
    out: str,
    settings: PredictSettings = PREDICT_DEFAULTS,
    mode: LaneMode = "local",
    lane_minutes: PositiveTime = 10.0,
    settle_seconds: SettleTime = 60.0,
) -> State[NightReport]:
    """Calls the contigs of every file in an inbox whose bytes have no results yet.

    A file that is still being written waits for the next night, one that cannot be used is moved aside with
    its reason, and a run that did not finish goes on the next night. A second night over the same results ends
    at once.

    Args:
        inbox: a folder, or a glob such as `/data/*/contigs.fa.gz`.
        out: folder of the results, one folder a file: NAME-HASH.
        settings: models and how to run them.
        mode: where the lanes run.
        lane_minutes: about how long a lane works, in pool mode.
        settle_seconds: how long nobody must have written to a file.

    Raises:
        VirnucError: some files failed and wait for the next night; the others are done.
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
        **_values(settings),
    }
    with lock_results(results) as is_alone:
        if not is_alone:
            message = f"another night is at work in {results}: this one leaves everything to it"
            _log.warning(message)
            return Completed(message=message, data=NightReport(inbox=inbox, out=results, outcomes=()))
        with tracked_run(night_name(), params, prefect_tags(results)) as tracked:
            files = sorted(iter_inbox(str(Path(inbox).absolute())), key=lambda file: file.mtime_ns)
            with open_digests(results / DIGESTS_NAME) as digests:
                night = Night(results, digests, _predicting(settings, mode, lane_minutes), settle_seconds)
                report = NightReport(inbox=inbox, out=results, outcomes=night.work_through(files))
            publish_night(report, tracked)
            if report.counts["failed"]:
                raise VirnucError(f"{report.summary}. {report.failures} They are tried again the next night.")
    return Completed(message=report.summary, data=report)


def _predicting(settings: PredictSettings, mode: LaneMode, lane_minutes: float) -> PredictFile:
    """Runs of predict with the settings of the night."""

    def predict_file(path: Path, out: Path) -> Attempt:
        # The state, and not the result: an error ends this run, and the night goes on.
        state: State[Any] = predict(
            inputs=[str(path)],
            out=str(out),
            settings=settings,
            mode=mode,
            lane_minutes=lane_minutes,
            return_state=True,
        )
        error = None if state.is_completed() else state.result(raise_on_failure=False)
        run_id = state.state_details.flow_run_id
        link = url_for("flow-run", obj_id=run_id) if run_id else None
        return Attempt(error=error, link=link or "")

    return predict_file


def _values(settings: PredictSettings) -> dict[str, Value]:
    return {name: ",".join(value) if isinstance(value, tuple) else value for name, value in settings}
