"""One `virnuc server up` for all tests here: a real server, MLflow and workers, with their own ports and home folder."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import UUID

import httpx
import psutil
import pytest
import torch
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun

from tests.end_to_end.conftest import random_dna, wait_until
from virnuc_core.inference.events import LaneEvent, LaneStarted, ShardDone
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.run_folder import RunFolder

# A dozen shards for two lanes.
# Two GPUs have a worker each, and the small models run slowly to leave time for kills.
ON_GPUS = torch.cuda.device_count() > 1
SETTINGS: dict[str, Any] = {
    "devices": ["auto" if ON_GPUS else "cpu"],
    "engine": "reference" if ON_GPUS else "packed",
    "shard_seconds": 0.4 if ON_GPUS else 1.0,
    "embeddings": "float16",
}
LANE_MINUTES = 0.06 if ON_GPUS else 0.12
NUM_GENOMES = 120 if ON_GPUS else 30
WORKERS = ("--devices", "0,1") if ON_GPUS else ("--devices", "cpu", "--workers", "2")
RESULTS = ("chunks.tsv", "contigs.tsv", "embeddings.h5")

Event = TypeVar("Event", bound=LaneEvent)


def access_of(home: Path) -> dict[str, str]:
    command = ["env", "-i", "sh", "-c", '. "$0" && env', str(home / "up" / "access.sh")]
    lines = subprocess.check_output(command, text=True).splitlines()
    return {name: text for name, _, text in (line.partition("=") for line in lines) if name != "PWD"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Prefect server, and a user's actions on it."""

    client: SyncPrefectClient

    def ask(self, environment: Mapping[str, str] = MappingProxyType({}), **parameters: Any) -> UUID:
        """Submits a run of predict/on-demand, with further environment variables for it and not for its lanes."""
        deployment = self.client.read_deployment_by_name("predict/on-demand")
        asked = {"settings": SETTINGS, "lane_minutes": LANE_MINUTES, **parameters}
        return self.client.create_flow_run_from_deployment(
            deployment.id, parameters=asked, job_variables={"env": dict(environment)}
        ).id

    def state(self, run_id: UUID) -> str:
        return self.client.read_flow_run(run_id).state_name or ""

    def wait_for(self, run_id: UUID, state: str, seconds: float = 200.0) -> FlowRun:
        """Fails as soon as the run ends in a state of another name."""

        def arrived() -> FlowRun | None:
            run = self.client.read_flow_run(run_id)
            assert run.state is not None
            return run if run.state.name == state or run.state.is_final() else None

        run = wait_until(arrived, seconds)
        assert run.state_name == state, run.state
        return run

    def children(self, run_id: UUID) -> dict[UUID, FlowRun]:
        """The planning run and the lanes that a run has submitted."""
        asked_by = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [run_id]}})
        return {run.id: run for run in self.client.read_flow_runs(flow_run_filter=asked_by)}

    def lanes(self, run_id: UUID) -> list[FlowRun]:
        return [run for run in self.children(run_id).values() if " lane " in run.name]

    def process_of(self, run_id: UUID) -> psutil.Process:
        return psutil.Process(int(self.client.read_flow_run(run_id).infrastructure_pid or ""))


@dataclass(frozen=True, kw_only=True)
class Stack(Server):
    """A running `virnuc server up`."""

    process: subprocess.Popen[str]
    home: Path
    port: int
    mlflow_port: int

    @property
    def access(self) -> dict[str, str]:
        """The variables of `up/access.sh`, with the password, as a shell has them after reading it."""
        return access_of(self.home)

    def shell(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a module in another shell that has read `up/access.sh`."""
        return subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            env={**os.environ, "VIRNUC_HOME": str(self.home), **self.access},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def program(self, word: str) -> psutil.Process | None:
        """The program kept running by `virnuc server up` with this word in its command, if any."""
        children = psutil.Process(self.process.pid).children()
        return next((child for child in children if word in child.cmdline()), None)


def processes_of(home: Path) -> list[psutil.Process]:
    """All processes with this home folder, except the tests themselves."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("VIRNUC_HOME") == str(home):
                found.append(process)
    return found


def same_results(one: Path, other: Path) -> bool:
    """Whether two runs have byte-identical shards and results."""
    shards = [sorted(path.name for path in RunFolder(root).shards.iterdir()) for root in (one, other)]
    names = [*RESULTS, *(f"shards/{name}" for name in shards[0])]
    return shards[0] == shards[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def lane_events(out: Path, kind: type[Event]) -> list[Event]:
    """Events of a kind in the journals of all lanes, by time."""
    journals = RunFolder(out).lanes.glob("lane-*.jsonl")
    events = [event for path in journals for event in JournalTail(path).read_new()]
    events.sort(key=lambda event: event.time)
    return [event for event in events if isinstance(event, kind)]


def shards_done(out: Path) -> list[int]:
    """Computed shards, with repetitions."""
    return [event.shard for event in lane_events(out, ShardDone)]


def wait_for_mid_run(out: Path) -> LaneStarted:
    """Waits until a lane has finished some but not all of its shards, and returns its start."""

    def find() -> LaneStarted | None:
        done = set(shards_done(out))
        for lane in lane_events(out, LaneStarted):
            if 0 < len(done & set(lane.shards)) < len(lane.shards):
                return lane
        return None

    return wait_until(find, 180)


@contextmanager
def running_stack(folder: Path, code: int = 0, **environment: str) -> Iterator[Stack]:
    """`virnuc server up` with further environment variables, until it ends with `code`; nothing is left of it afterwards.

    It makes its home folder itself, where new files are open to everybody by default, and works in a folder with hostile files.
    """
    home, output = folder / "home", folder / "up.log"
    port, mlflow_port = free_port(), free_port()
    unset = ("PREFECT_", "MLFLOW_", "VIRNUC_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    with output.open("w") as log:
        ports = ("--port", str(port), "--mlflow-port", str(mlflow_port))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "virnuc_cli", "server", "up", *ports, *WORKERS],
            env={**inherited, "VIRNUC_HOME": str(home), "VIRNUC_THREADS": "2", **environment},
            cwd=hostile_folder(folder / "data"),
            umask=0,
            stdout=log,
            stderr=log,
            text=True,
        )
        try:
            wait_until(lambda: process.poll() is not None or "Ctrl-C" in output.read_text(), 300)
            assert process.poll() is None, output.read_text()
            access = access_of(home)
            auth = access["PREFECT_API_AUTH_STRING"]
            with SyncPrefectClient(access["PREFECT_API_URL"], auth_string=auth) as client:
                yield Stack(process=process, home=home, port=port, mlflow_port=mlflow_port, client=client)
        finally:
            process.send_signal(signal.SIGINT)
            ended = process.wait(60)
        assert ended == code, output.read_text()
        wait_until(lambda: processes_of(home) == [], 10)


def hostile_folder(folder: Path) -> Path:
    """A working folder with modules and settings that leave a file `ran-NAME` there when they are used."""
    folder.mkdir()
    for name in ("mlflow", "pickle", "prefect", "random", "socket", "uvicorn"):
        (folder / f"{name}.py").write_text(f"open({str(folder / f'ran-{name}')!r}, 'w')\n")
    handler = {"class": "logging.FileHandler", "filename": str(folder / "ran-settings")}
    logging = {"version": 1, "handlers": {"file": handler}, "root": {"handlers": ["file"]}}
    (folder / "logging.yml").write_text(json.dumps(logging))
    (folder / ".env").write_text(f"PREFECT_LOGGING_SETTINGS_PATH={folder / 'logging.yml'}\n")
    return folder


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="session")
def genomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough sequence for about ten seconds of work."""
    path = tmp_path_factory.mktemp("genomes") / "genomes.fa"
    path.write_text("".join(f">genome_{i}\n{random_dna(4200, seed=100 + i)}\n" for i in range(NUM_GENOMES)))
    return path


@pytest.fixture(scope="session")
def local_run(stack: Stack, genomes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, undisturbed in local mode."""
    out = tmp_path_factory.mktemp("local") / "run"
    values = {**SETTINGS, "devices": SETTINGS["devices"][0]}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    done = stack.shell("virnuc_cli", "predict", genomes, "--out", out, *flags)
    assert done.returncode == 0, done.stderr
    return out
