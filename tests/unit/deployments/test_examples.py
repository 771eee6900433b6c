"""The examples for systemd and compose: they can be read, and what they run and set is there."""

import configparser
import shlex
import warnings
from pathlib import Path
from typing import Any

import prefect.settings
import pytest
import yaml

import deployments
from virnuc_cli.main import cli

with warnings.catch_warnings():  # of MLflow's own code
    warnings.simplefilter("ignore")
    from mlflow.cli import server as mlflow_server

EXAMPLES = Path(deployments.__file__).parent / "examples"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def is_known(variable: str) -> bool:
    """Whether Prefect, MLflow's server, or virnuc itself reads a variable."""
    mlflow = {getattr(option, "envvar", None) for option in mlflow_server.params}
    own = {
        "VIRNUC_HOME",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_DISABLE_TELEMETRY",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION",
    }
    return variable in mlflow | own or hasattr(prefect.settings, variable)


def require_command(words: list[str]) -> None:
    """Makes sure that a program takes these arguments."""
    program, command, *arguments = words
    if program == "virnuc":
        assert cli.commands[command].make_context(command, arguments)
    elif program == "mlflow":
        assert command == "server"
        assert mlflow_server.make_context("server", arguments)
    else:
        assert [program, command, arguments[0]] == ["prefect", "server", "start"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_can_be_read_and_runs_what_there_is(path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(path.read_text())
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    require_command([Path(program).name, *arguments])
    assert unit["Service"]["User"] == "virnuc"
    assert unit["Service"]["Restart"] == "always"
    assert unit["Service"]["EnvironmentFile"] == "/etc/virnuc.env"


def test_worker_unit_leaves_it_to_virnuc_to_end_workers() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(EXAMPLES / "systemd" / "virnuc-worker.service")
    assert unit["Service"]["KillMode"] == "mixed"
    assert int(unit["Service"]["TimeoutStopSec"]) > 45


def test_variables_of_the_units_exist() -> None:
    lines = (EXAMPLES / "systemd" / "virnuc.env").read_text().splitlines()
    names = {
        line.removeprefix("#").partition("=")[0] for line in lines if "=" in line and "# " not in line[:2]
    }
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" in names
    assert not is_known("PREFECT_NO_SUCH_THING")
    assert all(map(is_known, names))


def test_compose_services_run_what_there_is() -> None:
    assert set(SERVICES) == {"postgres", "prefect", "mlflow", "deploy", "worker"}
    for name, service in SERVICES.items():
        words = [*service.get("entrypoint", []), *service.get("command", [])]
        if name != "postgres":
            require_command(words)
            assert all(map(is_known, service["environment"]))
            assert service["init"] is True
        assert set(service.get("depends_on", {})) <= set(SERVICES)


def test_compose_publishes_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_holds_no_password() -> None:
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    urls = [
        value
        for service in SERVICES.values()
        for value in service["environment"].values()
        if "postgresql" in value
    ]
    assert len(urls) == 2
    assert all("://virnuc:${POSTGRES_PASSWORD}@postgres/" in url for url in urls)
