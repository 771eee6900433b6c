"""Overhead of a lane: startup, imports, loading, and everything that Prefect does for it.

    python -m benchmarks.lane_overhead [--repeats 5] [--lanes 6]

Everything is real: the lane flow of this package, its device process on the CPU with the bundled models, and a separate
Prefect server with SQLite and a worker, on the loopback interface. In one process a lane has no work; in the pool each has
one small shard. All measurements are kept; quote minima or medians, since other programs may run. Writes
benchmarks/results/lane_overhead.json.

Prefect reads the environment when it is first imported, so it is imported inside functions, after `serving` has set it.
"""

import os
import platform
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from benchmarks.reports import EXAMPLE, Json, command_of, options_of, print_and_write
from virnuc_core.inference.events import LaneFinished, ModelsLoaded
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.inference.launcher import run_lane
from virnuc_core.inference.planning import open_plan
from virnuc_core.models.catalogue import frames_of
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig

ROW_TABLES: Final = ("flow_run", "flow_run_state", "task_run", "task_run_state", "log", "events", "artifact")
LANE: Final = "embed-lane/cpu"
# Small enough to split the few examples into a shard per lane.
_SHARD_SECONDS: Final = 0.2
_SECONDS_IDLE: Final = 20.0
_CLIENTS: Final = 4
_SECONDS_OF_REQUESTS: Final = 3.0
_TIMEOUT_SECONDS: Final = 600.0
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")
_REQUEST: Final = re.compile(r'"([A-Z]+ \S+?)(?:\?\S*)? HTTP/1\.1"')
# Imports of a lane's processes, from nothing to everything.
_PROGRAMS: Final = {
    "interpreter": "pass",
    "torch": "import torch",
    "device process": "import virnuc_core.inference.worker",
    "Prefect": "import prefect",
    "flow-run process": "import prefect.engine, prefect.flow_engine, flows.lanes",
    "parent": "import flows.predict",
    "MLflow": "import mlflow",
}

Request = tuple[str, str, Json | None]


@dataclass(frozen=True, slots=True)
class Server:
    """A Prefect server: address, request log, database, and startup time."""

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
    """A server with virnuc's pools and deployments; this process and its children use it, and keep their files in `home`."""
    url, log = f"http://127.0.0.1:{port}/api", home / "server.log"
    os.environ.update(
        VIRNUC_HOME=str(home),
        PREFECT_HOME=str(home),
        PREFECT_API_URL=url,
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        PREFECT_SERVER_LOGGING_LEVEL="INFO",
    )
    from deployments.register import NightlyChoice, register

    def is_up() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=2.0).is_success
        except httpx.TransportError:
            return process.poll() is not None

    begin = time.perf_counter()
    command = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    with running(command, log) as process:
        wait_until(is_up, "the server is up")
        start_seconds = time.perf_counter() - begin
        register(NightlyChoice())
        yield Server(url, log, home / "prefect.db", start_seconds)


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module with its arguments, interrupted, as by Ctrl-C, at the end of the block."""
    program = (sys.executable, "-m", *command)
    with (
        log.open("w") as lines,
        subprocess.Popen(program, stdout=lines, stderr=lines, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until(is_so: Callable[[], bool], what: str) -> int:
    """Polls a few times a second, and returns the number of polls.

    Raises:
        TimeoutError: it does not become true.
    """
    end, polls = time.monotonic() + _TIMEOUT_SECONDS, 1
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {_TIMEOUT_SECONDS:.0f} s in vain until {what}")
        time.sleep(0.2)
        polls += 1
    return polls


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def plan_a_run(root: Path) -> RunFolder:
    """A planned run over the example contigs with the bundled models."""
    root.mkdir()
    folder = RunFolder(root)
    config = RunConfig(chunk_length=500, devices=("cpu",), shard_seconds=_SHARD_SECONDS)
    store = build_frame_store([str(EXAMPLE)], folder.frames, 500, frames=frames_of(config))
    open_plan(config, store, "predict", ("cpu",), folder)
    return folder


def program_seconds(repeats: int) -> dict[str, list[float]]:
    """Seconds of new Python processes that only import."""
    seconds: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for _ in range(repeats):
        for name, program in _PROGRAMS.items():
            run = partial(subprocess.run, [sys.executable, "-c", program], check=True)
            seconds[name].append(_seconds(run))
    return seconds


def subflow_seconds(repeats: int, folder: Path) -> Json:
    """Seconds of tasks, subflows and lanes in one process, with and without Prefect's heartbeats."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.lanes import embed_lane

    @task(cache_policy=NO_CACHE, persist_result=False)
    def nothing() -> None:
        """A task without work."""

    @flow(name="nothing", persist_result=False)
    def nothing_as_flow() -> None:
        """A flow without work."""

    @flow(name="parent", persist_result=False)
    def parent() -> dict[str, list[float]]:
        """The parent flow; its lane has no work."""
        calls: dict[str, Callable[[], object]] = {
            "task": nothing,
            "subflow": nothing_as_flow,
            "lane": lambda: embed_lane(str(folder), (), lane=0, device="cpu"),
        }
        return {name: [_seconds(call) for _ in range(repeats)] for name, call in calls.items()}

    measured: Json = {}
    for name, frequency in (("with_heartbeat", 60), ("without_heartbeat", None)):
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: frequency}):
            measured[name] = {"flow": [_seconds(nothing_as_flow) for _ in range(repeats)], **parent()}
    return measured


def pool_seconds(server: Server, lanes: int, folder: RunFolder) -> Json:
    """Cost of one-shard lanes in a pool with one worker, and their rows in the database."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.deployments import run_deployment

    from deployments.worker import QUERY_SECONDS
    from flows import CPU_POOL

    ids: list[Any] = []

    def submit(lane: int) -> None:
        parameters = {"folder": str(folder.root), "shards": [lane], "lane": lane, "device": "cpu"}
        run: Any = run_deployment(LANE, parameters=parameters, timeout=0)
        ids.append(run.id)

    @flow(name="parent", persist_result=False)
    def submit_all() -> list[float]:
        """Seconds of each lane, submitted one after another."""
        return [_seconds(partial(submit, lane)) for lane in range(lanes)]

    def have_ended() -> bool:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)))
        return all(run.state is not None and run.state.is_final() for run in runs)

    def has_worker() -> bool:
        return any(worker.status == "ONLINE" for worker in client.read_workers_for_work_pool(CPU_POOL))

    command = ("virnuc_cli", "worker", "--devices", "cpu", "--runs", "0")
    with get_client(sync_client=True) as client, running(command, folder.root / "worker.log"):
        wait_until(has_worker, "the worker is online")
        before = server.requests()
        time.sleep(_SECONDS_IDLE)
        idle = server.requests() - before
        before, rows, begin = server.requests(), server.rows(), time.time()
        submitted = submit_all()
        polls = wait_until(have_ended, "all lanes have ended")
        took = time.time() - begin
        time.sleep(5.0)  # events and logs are written asynchronously
        requests, grown = server.requests() - before, server.rows() - rows
        requests["POST /api/flow_runs/filter"] -= polls  # this benchmark's own polls
        timelines = [_timeline(client, folder, lane, run_id) for lane, run_id in enumerate(ids)]
    return {
        "lanes": lanes,
        "worker_query_seconds": QUERY_SECONDS,
        "submit_seconds": submitted,
        **_phases(timelines),
        "wall_seconds": took,
        "idle_worker_requests_per_second": {name: n / _SECONDS_IDLE for name, n in idle.most_common(6)},
        "requests_per_lane": {name: n / lanes for name, n in requests.most_common(25)},
        "requests_per_lane_in_all": sum(requests.values()) / lanes,
        "rows_per_lane": {name: n / lanes for name, n in grown.items()},
    }


def _timeline(client: Any, folder: RunFolder, lane: int, run_id: Any) -> dict[str, float]:
    """First time of each state of a run, by the server's clock, and seconds of its device process.

    Raises:
        RuntimeError: it failed, so its times mean nothing.
    """
    from tasks.local_lanes import lane_journal_name

    states = sorted(client.read_flow_run_states(run_id), key=lambda state: state.timestamp)
    if not states[-1].is_completed():
        raise RuntimeError(f"lane {run_id} ended {states[-1].name}: {states[-1].message}")
    journal = JournalTail(folder.lane_journal(lane_journal_name(lane, run_id)))
    events = [entry.event for entry in journal.read_new()]
    return {
        **{state.type.value: state.timestamp.timestamp() for state in reversed(states)},
        "load": next(event.seconds for event in events if isinstance(event, ModelsLoaded)),
        "process": next(event.seconds for event in events if isinstance(event, LaneFinished)),
    }


def _phases(timelines: list[dict[str, float]]) -> dict[str, list[float]]:
    """Seconds of each phase of lanes that one worker ran one after another."""
    runs = sorted(timelines, key=lambda run: run["PENDING"])
    return {
        "pending_to_running_seconds": [run["RUNNING"] - run["PENDING"] for run in runs],
        "running_to_completed_seconds": [run["COMPLETED"] - run["RUNNING"] for run in runs],
        "load_seconds": [run["load"] for run in runs],
        "process_seconds": [run["process"] for run in runs],
        "completed_to_next_pending_seconds": [b["PENDING"] - a["COMPLETED"] for a, b in pairwise(runs)],
        # Cost of a lane besides its device process.
        "besides_process_seconds": [b["PENDING"] - a["PENDING"] - a["process"] for a, b in pairwise(runs)],
    }


def server_rates(url: str, repeats: int) -> Json:
    """Requests per second by kind, also with many runs waiting."""
    from prefect.client.orchestration import get_client

    from flows import CPU_POOL

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(LANE)
    lane = {"parameters": {"folder": "there is none", "shards": list(range(10)), "lane": 0, "device": "cpu"}}
    health: Request = ("GET", "/health", None)
    due = {"work_queue_names": [], "limit": 200}
    poll: Request = ("POST", f"/work_pools/{CPU_POOL}/get_scheduled_flow_runs", due)
    create: Request = ("POST", f"/deployments/{deployment.id}/create_flow_run", lane)
    states: Request = ("POST", "/flow_runs/filter", {"limit": 200, "sort": "START_TIME_DESC"})

    def rates(request: Request, clients: int = _CLIENTS) -> dict[str, list[float]]:
        answered, refused = zip(*(_rate(url, request, clients) for _ in range(repeats)), strict=True)
        return {"answered_per_second": list(answered), "refused_per_second": list(refused)}

    found = {
        "health": rates(health),
        "poll of an empty pool": rates(poll),
        "create a run, one client": rates(create, clients=1),
        "create a run": rates(create),
    }
    with httpx.Client(timeout=60.0) as session:
        for _ in range(200):
            _is_answered(session, url, create)
    found["poll of a pool with a full queue"] = rates(poll)
    found["states of 200 runs"] = rates(states)
    return {"clients": _CLIENTS, "rates": found}


def _rate(url: str, request: Request, clients: int) -> tuple[float, float]:
    """Requests per second that are answered, and that are refused because the database is busy."""

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
    """A server with a busy database says so, or closes the connection."""
    method, path, body = request
    try:
        response = client.request(method, url + path, json=body)
    except httpx.TransportError:
        return False
    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        response.raise_for_status()
    return response.is_success


def main() -> None:
    """Command line."""
    parser = options_of("lane_overhead", __doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=6, help="lanes on the work pool")
    parser.add_argument("--port", type=int, default=4871)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    with TemporaryDirectory(prefix="virnuc-overhead-") as scratch:
        home = Path(scratch)
        folder = plan_a_run(home / "run")
        report: Json = {
            "command": command_of("lane_overhead"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other programs",
            "load_average": os.getloadavg(),
            "versions": {name: version(name) for name in ("prefect", "mlflow", "torch")},
            "program_seconds": program_seconds(repeats),
        }
        processes = [run_lane(folder, (), "cpu") for _ in range(repeats)]  # lanes without shards
        report["device_process"] = {
            name: [getattr(lane, name) for lane in processes] for name in ("load_seconds", "seconds")
        }
        with serving(home, arguments.port) as server:
            report["server_start_seconds"] = server.start_seconds
            report["in_process"] = subflow_seconds(repeats, folder.root)
            report["pool"] = pool_seconds(server, arguments.lanes, folder)
            report["server"] = server_rates(server.url, repeats)
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
