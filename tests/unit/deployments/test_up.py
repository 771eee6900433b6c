"""What keeps `virnuc up` from starting; that it starts is for tests/production."""

import socket
from pathlib import Path

import pytest

from deployments.processes import only_one
from virnuc_cli.main import main
from virnuc_core import env_config


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path))
    env_config.reload()


@pytest.mark.parametrize(("option", "other"), [("--port", "--mlflow-port"), ("--mlflow-port", "--port")])
def test_port_in_use(option: str, other: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        port, free_port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        assert main(["up", option, str(port), other, str(free_port), "--devices", "cpu"]) == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in (said := capfd.readouterr().err)
    assert f"give another {option}" in said


def test_port_out_of_range(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "70000", "--devices", "cpu"]) == 2
    assert "port 70000" in capfd.readouterr().err


def test_one_stack_a_home(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with only_one(tmp_path / "up" / "lock", ""):
        assert main(["up", "--devices", "cpu"]) == 2
    assert f"runs already with the home folder {tmp_path}" in capfd.readouterr().err
