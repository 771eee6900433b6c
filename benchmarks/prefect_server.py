"""A Prefect server to measure: what is asked of it, what it keeps, and how much it can answer."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from prefect.client.orchestration import get_client

from deployments.register import NightlyChoice, register
from deployments.server import GPU_POOL
from flows.pool import LANE_DEPLOYMENT

_CLIENTS: Final = 4
_SECONDS_OF_REQUESTS: Final = 3.0
_SECONDS_TO_WAIT: Final = 600.0
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")
_REQUEST: Final = re.compile(r'"([A-Z]+ \S+?)(?:\?\S*)? HTTP/1\.1"')
ROW_TABLES: Final = ("flow_run", "flow_run_state", "task_run", "task_run_state", "log", "events", "artifact")

Json = dict[str, Any]
Request = tuple[str, str, Json | None]


@dataclass(frozen=True, slots=True)
class Server:
    """A Prefect server: its address, the log of its requests, its database, and how long it took to start."""

    url: str
    log: Path
    database: Path
    start_seconds: float

    def requests(self) -> Counter[str]:
        """Requests so far by kind, without ids."""
        names = _REQUEST.findall(self.log.read_text(errors="replace"))
        return Counter(_UUID.sub("ID", name) for name in names)

    def rows(self) -> Counter[str]:
        """Rows so far in the tables that grow with every run, and the bytes of the database."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:

            def number(query: str) -> int:
                return int(database.execute(query).fetchone()[0])

            rows = {table: number(f"SELECT count(*) FROM {table}") for table in ROW_TABLES}
            return Counter(rows | {"bytes": number("PRAGMA page_count") * number("PRAGMA page_size")})


@contextmanager
def serving(home: Path, port: int) -> Iterator[Server]:
    """A server with virnuc's pools and deployments, on the loopback interface, for as long as the block lasts."""
    command = (sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    log, url = home / "server.log", f"http://127.0.0.1:{port}/api"
    begin = time.perf_counter()
    with running(command, log, {"PREFECT_SERVER_LOGGING_LEVEL": "INFO"}) as process:
        wait_until(lambda: process.poll() is not None or _is_healthy(url), "the server is up")
        start_seconds = time.perf_counter() - begin
        register(NightlyChoice())
        yield Server(url, log, home / "prefect.db", start_seconds)


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is interrupted, as by Ctrl-C, when the block ends."""
    with (
        log.open("w") as lines,
        subprocess.Popen(
            command,
            stdout=lines,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).is_success
    except httpx.TransportError:
        return False


def wait_until(is_so: Callable[[], bool], what: str) -> int:
    """Looks a few times a second, and says how often it did.

    Raises:
        TimeoutError: it does not become so.
    """
    end, looks = time.monotonic() + _SECONDS_TO_WAIT, 1
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {_SECONDS_TO_WAIT:.0f} s in vain until {what}")
        time.sleep(0.2)
        looks += 1
    return looks


def server_rates(url: str, repeats: int) -> Json:
    """What the server answers by kind of request, also while many runs wait."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(LANE_DEPLOYMENT)
    lane = {"parameters": {"folder": "there is none", "shards": list(range(10)), "lane": 0}}
    due = {"work_queue_names": [], "limit": 200}
    health: Request = ("GET", "/health", None)
    poll: Request = ("POST", f"/work_pools/{GPU_POOL}/get_scheduled_flow_runs", due)
    create: Request = ("POST", f"/deployments/{deployment.id}/create_flow_run", lane)
    states: Request = ("POST", "/flow_runs/filter", {"limit": 200, "sort": "START_TIME_DESC"})
    rates = {
        "health": _rates(url, health, repeats),
        "poll of an empty pool": _rates(url, poll, repeats),
        "create a run, one client": _rates(url, create, repeats, clients=1),
        "create a run": _rates(url, create, repeats),
    }
    with httpx.Client(timeout=60.0) as session:
        for _ in range(200):
            _is_answered(session, url, create)
    rates["poll of a pool with a full queue"] = _rates(url, poll, repeats)
    rates["states of 200 runs"] = _rates(url, states, repeats)
    return {"clients": _CLIENTS, "rates": rates}


def _rates(url: str, request: Request, repeats: int, clients: int = _CLIENTS) -> dict[str, list[float]]:
    """Requests a second that are answered, and that are refused because the database is busy."""
    measured = [_rate(url, request, clients) for _ in range(repeats)]
    return {
        "answered_per_second": [answered for answered, _ in measured],
        "refused_per_second": [refused for _, refused in measured],
    }


def _rate(url: str, request: Request, clients: int) -> tuple[float, float]:
    def ask_until(end: float) -> Counter[bool]:
        answers: Counter[bool] = Counter()
        with httpx.Client(timeout=60.0) as client:
            while time.monotonic() < end:
                answers[_is_answered(client, url, request)] += 1
        return answers

    begin = time.monotonic()
    with ThreadPoolExecutor(clients) as threads:
        answers = sum(threads.map(ask_until, [begin + _SECONDS_OF_REQUESTS] * clients), Counter[bool]())
    took = time.monotonic() - begin
    return answers[True] / took, answers[False] / took


def _is_answered(client: httpx.Client, url: str, request: Request) -> bool:
    """Whether the server answers; one whose database is busy says so, or hangs up."""
    method, path, body = request
    try:
        response = client.request(method, url + path, json=body)
    except httpx.TransportError:
        return False
    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        response.raise_for_status()
    return response.is_success
