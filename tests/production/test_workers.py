"""Several hosts with one shared folder: those that are not fit hold their lanes for others, and one dies."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient

from flows.lanes import HELD
from tests.end_to_end.conftest import random_dna, wait_until
from tests.production.conftest import Server, answers, free_port, lane_events, same_results
from tests.production.made_hosts import made_hosts
from virnuc_core import __version__
from virnuc_core.errors import DeviceError
from virnuc_core.inference.events import LaneStarted

ROOT = Path(__file__).parents[2]
PACKAGES = ("deployments", "flows", "tasks", "virnuc_cli", "virnuc_core")
SETTINGS = {"devices": ["cpu"], "shard_seconds": 1.0, "embeddings": "float16"}
COMPUTE = "LocalLanes((own,), observe, in_processes=True).compute_lane(run, shards, lane, own)"
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
def test_a_run_goes_round_hosts_that_are_not_fit_and_one_that_dies(tmp_path: Path) -> None:
    """They hold what they take, but for the sick one, which fails it until its worker ends; the dying one has a namesake."""
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
    changed = {
        "outdated": ("virnuc_core/__init__.py", f'"{__version__}"', '"0.0.9"'),
        "early": ("tasks/preflight.py", "(datetime.now(UTC) - server_time(client)).total_seconds()", "300.0"),
        "sick": ("flows/lanes.py", COMPUTE, 'raise DeviceLostError("this device is lost.")'),
    }
    port = free_port()
    names = ["fit", "unmounted", *changed, "fit"]
    with ExitStack() as stack:
        hosts = stack.enter_context(made_hosts(names, tmp_path, port))
        fit, unmounted, *_, sick, dying = hosts
        client = stack.enter_context(SyncPrefectClient(fit.server))
        serve = ("prefect", "server", "start", "--host", "0.0.0.0", "--port", str(port))
        fit.start(*serve, PREFECT_HOME=str(fit.home / "prefect"))
        wait_until(lambda: answers(fit.server), 300)
        assert fit.start("virnuc_cli", "server", "deploy").wait(300) == 0, fit.log.read_text()
        unmounted.hidden = shared
        work = ("virnuc_cli", "server", "worker")
        fit.start(*work, "--devices", "none", "--runs", "1")
        for host in hosts[1:-1]:
            own = installation(tmp_path / host.name, *changed[host.name]) if host.name in changed else {}
            host.start(*work, "--devices", "cpu", "--runs", "0", **own)
        server = Server(client=client)
        run_id = server.ask(inputs=[str(genomes)], out=str(out), settings=SETTINGS, lane_minutes=0.03)

        def held() -> dict[str, str]:
            """Why each host holds what it has taken."""
            found = [run for run in server.children(run_id).values() if run.state_name == HELD]
            return {
                str(run.labels["prefect.worker.name"]).partition("-")[0]: str(run.state and run.state.message)
                for run in found
            }

        wait_until(lambda: len(held()) == 3, 500)
        reasons = held()
        assert "mount the shared folder" in reasons["unmounted"]
        assert "virnuc 0.0.9 is installed" in reasons["outdated"]
        assert "the clock of this host is 300 s ahead" in reasons["early"]
        wait_until(lambda: "3 lanes in a row failed" in sick.log.read_text(), 300)
        dying.start(*work, "--devices", "cpu", "--runs", "0")
        [lost] = wait_until(lambda: [run for run in server.lanes(run_id) if run.state_name == "Running"], 300)
        dying.die()
        fit.start(*work, "--devices", "cpu", "--runs", "0")
        server.wait_for(run_id, "Completed", 600)
        assert server.state(lost.id) == "Crashed"
    assert same_results(local, out)
    assert {lane.host for lane in lane_events(out, LaneStarted)} == {"fit"}
