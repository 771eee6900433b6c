"""Workers of made hosts: those that are not fit are refused, or found and kept out; a server that pauses loses no run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.server import QUARANTINED, quarantines
from tests.end_to_end.conftest import random_dna, wait_until
from tests.production.conftest import free_port, lane_events, same_results
from tests.production.made_hosts import made_hosts
from virnuc_core import __version__
from virnuc_core.errors import DeviceError
from virnuc_core.inference.events import LaneStarted

ROOT = Path(__file__).parents[2]
PACKAGES = ("deployments", "flows", "tasks", "virnuc_cli", "virnuc_core")
SETTINGS = {"devices": ["cpu"], "shard_seconds": 1.0, "embeddings": "float16"}
# As an installation of its own: the folder of this one is not on the path.
ELSEWHERE = {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize("devices", ["auto", "0"])
def test_a_worker_without_a_gpu_is_refused_by_the_gpu_pool(tmp_path: Path, devices: str) -> None:
    """Before any server is asked."""
    done = subprocess.run(
        [sys.executable, "-m", "virnuc_cli", "server", "worker", "--devices", devices],
        env={**os.environ, "VIRNUC_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == DeviceError.exit_code
    assert "--devices cpu" in done.stderr


def installation(folder: Path, file: str, old: str, new: str) -> dict[str, str]:
    """Environment of a copy of virnuc with one change."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    return {**ELSEWHERE, "PYTHONPATH": str(folder)}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_goes_round_hosts_that_are_not_fit(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    genomes, out, local = shared / "genomes.fa", shared / "run", tmp_path / "local"
    genomes.write_text("".join(f">genome_{i}\n{random_dna(4200, seed=100 + i)}\n" for i in range(30)))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, "devices": "cpu"}.items()]
    subprocess.run(
        [sys.executable, "-m", "virnuc_cli", "predict", genomes, "--out", local, *flags],
        env={**os.environ, "VIRNUC_HOME": str(tmp_path / "home")},
        check=True,
    )
    old = installation(tmp_path / "old", "virnuc_core/__init__.py", f'"{__version__}"', '"0.0.9"')
    sick = installation(
        tmp_path / "sick",
        "flows/lanes.py",
        "LocalLanes((own,), observe, in_processes=True).compute_lane(run, shards, lane, own)",
        'raise DeviceLostError("this device is lost.")',
    )
    port = free_port()
    names = ["fit", "unmounted", "outdated", "sick"]
    with ExitStack() as stack:
        hosts = stack.enter_context(made_hosts(names, tmp_path, port))
        fit, unmounted, outdated, other = hosts
        client = stack.enter_context(SyncPrefectClient(fit.server))
        serve = ("prefect", "server", "start", "--host", "0.0.0.0", "--port", str(port))
        fit.start(*serve, PREFECT_HOME=str(fit.home / "prefect"))
        wait_until(lambda: answers(f"{fit.server}/health"), 300)
        assert fit.start("virnuc_cli", "server", "deploy").wait(300) == 0, fit.log.read_text()
        unmounted.hidden = shared
        alone = ("virnuc_cli", "server", "worker", "--devices", "cpu", "--runs", "0")
        unmounted.start(*alone)
        outdated.start(*alone, **old)
        other.start(*alone, **sick)
        fit.start("virnuc_cli", "server", "worker", "--devices", "cpu", "--runs", "1")
        deployment = client.read_deployment_by_name("predict/on-demand")
        asked = {"inputs": [str(genomes)], "out": str(out), "settings": SETTINGS, "lane_minutes": 0.03}
        run_id = client.create_flow_run_from_deployment(deployment.id, parameters=asked).id

        def ended() -> FlowRun | None:
            run = client.read_flow_run(run_id)
            return run if run.state and run.state.is_final() else None

        with temporary_settings({PREFECT_API_URL: fit.server}):
            found = wait_until(lambda: ended() or (len(quarantines()) == 3 and quarantines()), 600)
        assert isinstance(found, list), found
        reasons = {each.name.partition("-")[0]: each.reason for each in found}
        assert "mount the shared folder" in reasons["unmounted"]
        assert "virnuc 0.0.9 is installed here" in reasons["outdated"]
        assert "this device is lost" in reasons["sick"]
        doctor = subprocess.run(
            [sys.executable, "-m", "virnuc_cli", "doctor", "--quick", "--json"],
            env={**os.environ, "PREFECT_API_URL": fit.server, "VIRNUC_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
        )
        shown = [each for each in json.loads(doctor.stdout)["findings"] if each["topic"] == "workers"]
        assert {"sick", "outdated"} <= {each["name"].partition("-")[0] for each in shown}
        run = wait_until(ended, 600)
        assert run.state is not None
        assert run.state.is_completed(), run.state
        events = client.read_events(EventFilter(event=EventNameFilter(name=[QUARANTINED])), limit=50).events
        assert {(event.resource.name or "").partition("-")[0] for event in events} == {*names} - {"fit"}
        for host in (unmounted, outdated, other):
            assert "is in quarantine" in host.log.read_text()
    assert same_results(local, out)
    assert {lane.host for lane in lane_events(out, LaneStarted)} == {"fit"}


LIVE = """
import time
from prefect import flow, tags

@flow
def live() -> None:
    time.sleep(900)

if __name__ == "__main__":
    with tags("virnuc"):
        live()
"""
# Heartbeats come every 30 s at most.
WATCH = """
import asyncio
from deployments.lost_runs import crash_lost_runs
asyncio.run(crash_lost_runs("host", 95.0, 15.0))
"""


@contextmanager
def running(*command: str | Path, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of Python in a process group of its own."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **environment},
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_live_run_survives_a_pause_of_the_server_and_a_dead_one_is_found(tmp_path: Path) -> None:
    port, script, log = free_port(), tmp_path / "live.py", tmp_path / "log"
    script.write_text(LIVE)
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        "PREFECT_API_URL": url,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    }
    serve = ("-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    with running(*serve, log=log, **environment) as server, SyncPrefectClient(url) as client:
        wait_until(lambda: answers(f"{url}/health"), 120)

        def states() -> list[str | None]:
            return [run.state_name for run in client.read_flow_runs()]

        with (
            running("-c", WATCH, log=log, **environment),
            running(script, log=log, **environment) as run,
        ):
            wait_until(lambda: states() == ["Running"], 120)
            time.sleep(75)
            os.killpg(server.pid, signal.SIGSTOP)
            time.sleep(100)  # so that the run had no heartbeat for longer than it may
            os.killpg(server.pid, signal.SIGCONT)
            begin = time.monotonic()
            while time.monotonic() < begin + 100:
                assert states() == ["Running"]
                time.sleep(2)
            os.killpg(run.pid, signal.SIGKILL)
            wait_until(lambda: states() == ["Crashed"], 250)
            [found] = client.read_flow_runs()
            assert found.state is not None
            assert found.state.message == "No heartbeat for 95 s."


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False
