"""prefect.yaml, automations.yaml, the Dockerfile and the examples refer only to what exists."""

import configparser
import fnmatch
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import prefect.settings
import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint

import deployments
from deployments.lost_runs import WINDOW_SECONDS
from deployments.register import NIGHTLY, PREFECT_FILE
from deployments.server import CPU_POOL, GPU_POOL, POOLS, RUNS_POOL
from flows.pool import WORK_POOLS
from virnuc_cli.main import cli

with warnings.catch_warnings():  # of MLflow's own code
    warnings.simplefilter("ignore")
    from mlflow.cli import server as mlflow_server

ROOT = Path(__file__).parents[3]
EXAMPLES = Path(deployments.__file__).parent / "examples"
DOCUMENT: dict[str, Any] = yaml.safe_load(PREFECT_FILE.read_text())
DEPLOYMENTS: list[dict[str, Any]] = DOCUMENT["deployments"]
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
JOBS = sorted((EXAMPLES / "slurm").glob("*.sbatch"))
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())[
    "services"
]
# Dockerfile instructions with continuation lines joined, without comments.
LINES = re.sub(
    r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line.strip()]


def full_name(item: dict[str, Any]) -> str:
    return f"{load_flow_from_entrypoint(item['entrypoint']).name}/{item['name']}"


def test_the_deployments_and_their_pools() -> None:
    whole_runs = ("predict", "embed", "train", "evaluate")
    assert {full_name(item): item["work_pool"]["name"] for item in DEPLOYMENTS} == {
        **{f"{flow}/on-demand": RUNS_POOL for flow in whole_runs},
        NIGHTLY: RUNS_POOL,
        "embed-lane/gpu": GPU_POOL,
        "plan-run/gpu": GPU_POOL,
        "embed-lane/cpu": CPU_POOL,
        "plan-run/cpu": CPU_POOL,
        "predict-files/gpu": GPU_POOL,
        "predict-files/cpu": CPU_POOL,
    }
    assert WORK_POOLS == {"cuda": GPU_POOL, "cpu": CPU_POOL}


@pytest.mark.parametrize("item", DEPLOYMENTS, ids=lambda item: item["entrypoint"])
def test_parameters_and_environment(item: dict[str, Any]) -> None:
    parameters = item.get("parameters", {})
    known = load_flow_from_entrypoint(item["entrypoint"]).parameters.properties
    pool = item["work_pool"]
    assert pool["work_queue_name"] == (
        "plans" if "plan" in item["tags"] else "nights" if "nightly" in item["tags"] else "normal"
    )
    assert pool["work_queue_name"] in POOLS[pool["name"]].queues
    assert set(parameters) <= set(known)
    assert parameters.get("mode") == ("pool" if "mode" in known else None)
    assert "virnuc" in item["tags"]
    environment = pool["job_variables"]["env"]
    assert all(isinstance(value, str) for value in environment.values())
    # Three heartbeats may be missed.
    assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) < WINDOW_SECONDS
    # The code comes from each host's installation.
    assert DOCUMENT["pull"] == []
    assert ":" not in item["entrypoint"]


def test_schedules_can_be_used() -> None:
    [every_night] = [item for item in DEPLOYMENTS if "schedules" in item]
    [schedule] = every_night["schedules"]
    assert full_name(every_night) == NIGHTLY
    assert schedule["active"] is False  # until it has folders
    assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]).timezone == "UTC"


def require_known(variable: str) -> None:
    """Requires that Prefect, MLflow's server or virnuc reads the variable."""
    mlflow = {getattr(option, "envvar", None) for option in mlflow_server.params}
    own = {"VIRNUC_HOME", "VIRNUC_STAGING", "HF_HOME", "MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY"}
    known = mlflow | own | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION"}
    assert variable in known or hasattr(prefect.settings, variable)


def require_virnuc_command(words: list[str]) -> None:
    found: click.Command = cli
    while isinstance(found, click.Group):
        found, words = found.commands[words[0]], words[1:]
    assert found.make_context(found.name, words)


def require_command(words: list[str]) -> None:
    """Requires that a program accepts these arguments."""
    program, command, *arguments = words
    if program == "virnuc":
        require_virnuc_command(words[1:])
    elif program == "mlflow":
        assert command == "server"
        assert mlflow_server.make_context("server", arguments)
    else:
        assert (program, arguments[0]) == ("prefect", "start")
        assert command in ("server", "worker")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_unit_runs_what_there_is(path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(path.read_text())
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    require_command([Path(program).name, *arguments])
    assert (service["User"], service["Restart"]) == ("virnuc", "always")
    assert service["EnvironmentFile"] == "/etc/virnuc.env"
    if path.stem == "virnuc-worker":  # which ends its runs itself
        assert service["KillMode"] == "mixed"
        assert int(service["TimeoutStopSec"]) > 45


def test_variables_of_the_units_exist() -> None:
    text = (EXAMPLES / "systemd" / "virnuc.env").read_text()
    names = re.findall(r"^#?([A-Z_]+)=", text, re.MULTILINE)
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" in names
    for name in names:
        require_known(name)
    with pytest.raises(AssertionError):
        require_known("PREFECT_NO_SUCH_THING")


def test_compose_file_is_valid() -> None:
    command = (
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        EXAMPLES / "compose" / "compose.yaml",
    )
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_hosts_share_no_home_folder() -> None:
    volumes = dict(volume.rpartition(":")[::2] for volume in SERVICES["worker"]["volumes"])
    assert volumes["home"] == SERVICES["worker"]["environment"]["VIRNUC_HOME"]
    for service in SERVICES.values():
        assert not service["environment"].get("VIRNUC_HOME", "").startswith("/data")


def test_compose_runs_what_there_is_on_loopback_and_holds_no_password() -> None:
    assert set(SERVICES) == {"postgres", "prefect", "mlflow", "deploy", "worker"}
    assert SERVICES["worker"]["restart"] == "always"
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        if name != "postgres":
            require_command([*service.get("entrypoint", []), *service.get("command", [])])
            for variable in service["environment"]:
                require_known(variable)
            assert service["init"] is True
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert [port.split(":")[0] for port in ports] == ["127.0.0.1"] * 2
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    values = [value for service in SERVICES.values() for value in service["environment"].values()]
    urls = [value for value in values if "postgresql" in value]
    assert ["://virnuc:${POSTGRES_PASSWORD}@postgres/" in url for url in urls] == [True, True]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_slurm_job_is_shell_and_runs_what_there_is(path: Path) -> None:
    text = path.read_text()
    subprocess.run(["/bin/bash", "-n", str(path)], check=True)
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    assert {"job-name", "gpus", "time", "output", "signal"} <= set(options)
    [command] = re.findall(r"^exec virnuc (.*)$", text, re.MULTILINE)
    words = shlex.split(command.removesuffix(' "$@"'))
    require_virnuc_command(words)
    assert path.stem in words


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def test_images_are_pinned_and_run_virnuc_without_rights() -> None:
    assert {name for name, _ in INSTRUCTIONS} == {
        *("FROM", "WORKDIR", "COPY", "RUN", "ENV", "ARG", "USER", "VOLUME", "ENTRYPOINT", "CMD", "STOPSIGNAL")
    }
    stages: list[str] = []
    for line in arguments("FROM"):
        base, _, name = line.split()
        assert base in stages or re.fullmatch(r"python:3\.1[123]\.\d+-slim-bookworm", base)
        stages.append(name)
    assert {"cpu", "cuda"} <= set(stages)
    assert arguments("ENTRYPOINT") == ['["virnuc"]'] * 2
    assert arguments("USER") == ["virnuc"] * 2
    assert arguments("STOPSIGNAL") == ["SIGINT"]
    home = re.search(r"VIRNUC_HOME=(\S+)", " ".join(arguments("ENV")))
    assert home
    assert arguments("VOLUME") == [f'["{home[1]}"]'] * 2
    for command in arguments("RUN"):
        subprocess.run(["/bin/sh", "-n", "-c", command], check=True)


def test_apptainer_mounts_the_folders_of_the_images() -> None:
    page = (ROOT / "docs" / "how-to" / "container.md").read_text()
    home = re.search(r"VIRNUC_HOME=(\S+)", " ".join(arguments("ENV")))
    [data] = set(arguments("WORKDIR")) - {"/source"}
    assert home
    assert re.findall(
        r'apptainer run .*--home "\$PWD/[\w-]+:(\S+)" --bind "\$PWD:(\S+)" --pwd (\S+) ', page
    ) == [(home[1], data, data)]


def test_all_that_the_images_copy_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {path for path in allowed if not (ROOT / path).exists()} == set()
    copied = [shlex.split(line)[:-1] for line in arguments("COPY") if not line.startswith("--from=")]
    sources = [source for line in copied for source in line]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source
    assert {"virnuc_core", "tasks", "flows", "deployments", "virnuc_cli", "LICENSE"} <= set(sources)
