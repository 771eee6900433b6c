"""Finds runs that died together with their host.

An automation of the Prefect server cannot: after a pause of the server it would take the runs that are alive for dead,
before it has read the heartbeats that they sent meanwhile.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import UUID

import httpx

from deployments.server import connect, crash_run
from tasks.pool_runs import read_pages

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

# Four heartbeats of prefect.yaml.
WINDOW_SECONDS: Final = 240.0

_HEARTBEAT: Final = "prefect.flow-run.heartbeat"
_PULSE: Final = "virnuc.worker.pulse"

_log = logging.getLogger(__name__)


class SteadyServer:
    """Since when the Prefect server has answered without a break."""

    def __init__(self, window: float, now: float) -> None:
        self._window = window
        self._since = now

    def confirm(self, silent: list[UUID] | None, now: float) -> list[UUID]:
        """Runs that are lost, of those that are silent; None for a server that did not answer."""
        if silent is None:
            self._since = now
            return []
        return silent if now - self._since > self._window else []


async def crash_lost_runs(worker: str, window: float = WINDOW_SECONDS, every: float = 60.0) -> None:
    """Marks runs without a heartbeat for `window` seconds as Crashed; looks every `every` seconds until cancelled.

    Only while the server has answered, and received this worker's own events, for as long.
    """
    from prefect.events import emit_event

    resource = f"virnuc.worker.{worker}"
    server = SteadyServer(window, time.monotonic())
    while True:
        pulse = datetime.now(UTC)
        emit_event(_PULSE, {"prefect.resource.id": resource})
        await asyncio.sleep(every)
        try:
            async with asyncio.timeout(every):
                silent = await asyncio.to_thread(find_silent_runs, resource, pulse, timedelta(seconds=window))
                for run_id in server.confirm(silent, time.monotonic()):
                    await asyncio.to_thread(crash_run, run_id, f"No heartbeat for {window:.0f} s.")
        except (httpx.HTTPError, RuntimeError, TimeoutError) as error:
            server.confirm(None, time.monotonic())
            _log.warning("the Prefect server does not answer (%r): no run is taken for lost meanwhile", error)


def find_silent_runs(resource: str, pulse: datetime, window: timedelta) -> list[UUID] | None:
    """Runs that have had heartbeats, but none for `window`; None when the event at `pulse` has not arrived."""
    from prefect.client.schemas.filters import FlowRunFilter

    now = datetime.now(UTC)
    started = FlowRunFilter.model_validate(
        {"tags": {"all_": ["virnuc"]}, "state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}
    )
    with connect() as client:
        last = _last_events(client, now - window)
        if resource not in last or last[resource] < pulse:
            return None
        runs = read_pages(lambda **page: client.read_flow_runs(flow_run_filter=started, **page))
        silent = {
            f"prefect.flow-run.{run.id}": run.id
            for run in runs
            if run.state and run.state.timestamp < now - window
        }
        silent = {key: run_id for key, run_id in silent.items() if key not in last}
        had_some = _last_events(client, now - timedelta(days=7), list(silent)) if silent else {}
        return [run_id for key, run_id in silent.items() if key in had_some]


def _last_events(
    client: "SyncPrefectClient", since: datetime, resources: list[str] | None = None
) -> dict[str, datetime]:
    """Time of the last heartbeat of each run, and of the last pulse of each worker."""
    from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter

    wanted = EventFilter(
        event=EventNameFilter(name=[_HEARTBEAT, _PULSE]),
        occurred=EventOccurredFilter.model_validate({"since": since}),
        resource=EventResourceFilter(id=resources) if resources else None,
    )
    body = {"filter": wanted.model_dump(mode="json"), "time_unit": "day"}
    counts = client.request(
        "POST", "/events/count-by/{countable}", path_params={"countable": "resource"}, json=body
    ).json()
    return {each["value"]: datetime.fromisoformat(each["end_time"]) for each in counts}
