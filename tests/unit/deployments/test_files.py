"""prefect.yaml, the automations, the Dockerfile and the examples agree with the product and refer only to what exists."""

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
from prefect.flows import load_flow_from_entrypoint

from deployments.deploy import FILES, POOLS
from flows import nightly
from tasks.artifacts import RUN_TAG
from virnuc_cli.main import cli
from virnuc_core import __version__

with warnings.catch_warnings():  # of MLflow's own code
    warnings.simplefilter("ignore")
    from mlflow.cli import server as mlflow_server

ROOT = Path(__file__).parents[3]
EXAMPLES = FILES / "examples"
DOCUMENT: dict[str, Any] = yaml.safe_load((FILES / "prefect.yaml").read_text())
DEPLOYMENTS: list[dict[str, Any]] = DOCUMENT["deployments"]
ALARMS = yaml.safe_load((FILES / "alarms.yaml").read_text())["automations"]
AUTOMATIONS = yaml.safe_load((FILES / "automations.yaml").read_text())["automations"]
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())[
    "services"
]
# Dockerfile instructions with continuation lines joined, without comments.
LINES = re.sub(
    r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line.strip()]


@pytest.mark.parametrize("item", DEPLOYMENTS, ids=lambda item: f"{item['entrypoint']} {item['name']}")
def test_deployment(item: dict[str, Any]) -> None:
    known = load_flow_from_entrypoint(item["entrypoint"]).parameters.properties
    pool, parameters = item["work_pool"], item.get("parameters", {})
    assert item["version"] == __version__
    assert set(parameters) <= set(known)
    assert parameters.get("mode") == ("pool" if "mode" in known else None)
    assert item["tags"][0] == RUN_TAG
    kinds = {"lane", "plan", "nightly"} & {*item["tags"][1:]}
    assert pool["name"] == ("virnuc-runs" if not kinds & {"lane", "plan"} else f"virnuc-{item['name']}")
    assert pool["work_queue_name"] == ("plans" if "plan" in kinds else "normal")
    assert pool["work_queue_name"] in POOLS[pool["name"]]
    assert set(pool["job_variables"]) - {"gpus"} == {"env", "image", "cpu", "memory"}
    assert (
        pool["job_variables"]["env"].items()
        >= {
            "PREFECT_LOGGING_EXTRA_LOGGERS": "virnuc_core,tasks,flows",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
            "PREFECT_CLIENT_MAX_RETRIES": "9",
        }.items()
    )
    for name, value in pool["job_variables"]["env"].items():
        require_known(name)
        assert isinstance(value, str)
    # The code comes from each host's installation.
    assert DOCUMENT["pull"] == []
    assert ":" not in item["entrypoint"]


def test_alarms_go_by_what_flows_and_deployments_are_called() -> None:
    assert len({alarm["name"] for alarm in ALARMS}) == len(ALARMS) == 5
    assert all(alarm["name"].startswith("virnuc: ") for alarm in (*ALARMS, *AUTOMATIONS))
    assert f"prefect.flow-run.{nightly.FILES_REJECTED}" in ALARMS[0]["trigger"]["expect"]
    assert ALARMS[0]["trigger"]["match_related"]["prefect.resource.name"] in {
        item["name"] for item in DEPLOYMENTS if "nightly" in item["tags"]
    }


def require_known(variable: str) -> None:
    """Requires that Prefect, MLflow's server or virnuc reads the variable."""
    mlflow = {getattr(option, "envvar", None) for option in mlflow_server.params}
    own = {"VIRNUC_HOME", "VIRNUC_STAGING", "HF_HOME", "MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY"}
    known = mlflow | own | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION"}
    assert variable in known or hasattr(prefect.settings, variable)


def require_command(words: list[str]) -> None:
    """Requires that a program accepts these arguments."""
    program, command, *arguments = words
    if program == "virnuc":
        found: click.Command = cli
        words = words[1:]
        while isinstance(found, click.Group):
            found, words = found.commands[words[0]], words[1:]
        assert found.make_context(found.name, words)
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
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"].replace("%i", "0"))
    require_command([Path(program).name, *arguments])
    assert (service["User"], service["Restart"]) == ("virnuc", "always")
    assert service["EnvironmentFile"] == "/etc/virnuc.env"
    if "worker" in arguments:  # which ends its runs itself
        assert service["KillMode"] == "mixed"
        assert int(service["TimeoutStopSec"]) > 45
        assert int(unit["Unit"]["StartLimitBurst"]) * int(service["RestartSec"]) < int(
            unit["Unit"]["StartLimitIntervalSec"]
        )


def test_variables_of_the_units_exist() -> None:
    names = re.findall(r"^#?([A-Z_]+)=", (EXAMPLES / "systemd" / "virnuc.env").read_text(), re.MULTILINE)
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" in names
    for name in names:
        require_known(name)
    with pytest.raises(AssertionError):
        require_known("PREFECT_NO_SUCH_THING")


def test_compose_runs_what_there_is_on_loopback_and_holds_no_password() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec", str(EXAMPLES / "compose" / "compose.yaml"))
    subprocess.run([sys.executable, "-m", "check_jsonschema", *schema], capture_output=True, check=True)
    for name, service in SERVICES.items():
        if name != "postgres":
            require_command([*service.get("entrypoint", []), *service.get("command", [])])
            for variable in service["environment"]:
                require_known(variable)
        # Hosts share no home folder.
        assert not service["environment"].get("VIRNUC_HOME", "").startswith("/data")
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert [port.split(":")[0] for port in ports] == ["127.0.0.1"] * 2
    values = " ".join(str(service["environment"]) for service in SERVICES.values())
    assert values.count("://virnuc:${POSTGRES_PASSWORD}@postgres/") == values.count("postgresql+") == 2


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def test_images_are_pinned_and_run_virnuc_without_rights() -> None:
    stages: list[str] = []
    for line in arguments("FROM"):
        base, _, name = line.split()
        assert base in stages or re.fullmatch(r"python:3\.1[123]\.\d+-slim-bookworm", base)
        stages.append(name)
    assert {"cpu", "cuda"} <= set(stages)
    assert arguments("ENTRYPOINT") == ['["virnuc"]'] * 2
    assert arguments("USER") == ["virnuc"] * 2
    assert arguments("STOPSIGNAL") == ["SIGINT"]
    for command in arguments("RUN"):
        subprocess.run(["/bin/sh", "-n", "-c", command], check=True)


def test_apptainer_mounts_the_folders_of_the_images() -> None:
    page = (ROOT / "docs" / "how-to" / "container.md").read_text()
    home = re.search(r"VIRNUC_HOME=(\S+)", " ".join(arguments("ENV")))
    [data] = set(arguments("WORKDIR")) - {"/source"}
    assert home
    assert arguments("VOLUME") == [f'["{home[1]}"]'] * 2
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
