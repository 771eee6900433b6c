"""What keeps a host from computing: its release, disk, clock, folder or device."""

import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks import preflight
from tasks.preflight import clock_fault, device_fault, find_fault
from tasks.server import server_time
from virnuc_core.device_record import recording_device
from virnuc_core.doctor.preflight import version_fault
from virnuc_core.errors import DeviceLostError
from virnuc_core.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [([0] * 3, ""), ([300] * 3, " s ahead of"), ([-90] * 3, " s behind"), ([90, 0, 0], "")],
)
def test_a_clock_that_is_off_by_the_servers_time(
    monkeypatch: pytest.MonkeyPatch, seconds: list[int], said: str
) -> None:
    shifts = iter(seconds)
    monkeypatch.setattr(
        preflight, "server_time", lambda client: server_time(client) - timedelta(seconds=next(shifts))
    )
    found = clock_fault() or ""
    assert said in found
    assert ("the Prefect server: synchronize it" in found) == bool(said)


def test_the_folder_of_the_run_must_be_the_same_here(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lanes.mkdir()

    def fault(token: str) -> str | None:
        return find_fault(lambda: folder.require_token(token), "cpu")

    assert "mount the shared folder" in (fault("0123") or "")
    folder.token.write_text("0123")
    assert fault("0123") is None
    assert "it belongs to another run" in (fault("4567") or "")


@pytest.mark.parametrize("deployed", [None, "4298898d3f", "unknown"])
def test_a_version_that_is_no_release_is_passed_over(deployed: str | None) -> None:
    """As `prefect deploy` gives one to a file without a version."""
    assert version_fault(deployed) is None
    assert "is installed, but the deployment is of 9.9.0" in (version_fault("9.9.0") or "")


@pytest.mark.parametrize("answer", ["fits", "is sick", "hangs"])
def test_a_gpu_is_tried_out_at_first_and_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    tried: list[Any] = []

    def run(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        tried.append(command)
        if answer == "hangs":
            raise subprocess.TimeoutExpired(command, timeout)
        code = 0 if answer == "fits" else 1
        return subprocess.CompletedProcess(command, code, "", "warning\na product of matrices is wrong\n")

    monkeypatch.setattr(preflight.subprocess, "run", run)
    record = tmp_path / "record"
    said: Callable[[], str | None] = lambda: device_fault(record, "cuda")  # noqa: E731
    expected = {
        "fits": None,
        "is sick": "a product of matrices is wrong",
        "hangs": "the GPU did not respond within 180 s",
    }
    assert said() == expected[answer]
    assert device_fault(record, "cpu") is None
    with recording_device(record):
        pass
    assert said() is None
    assert len(tried) == 1
    for number in range(3):
        with pytest.raises(DeviceLostError), recording_device(record):
            raise DeviceLostError("the GPU fell off the bus")
        assert ("lanes in a row failed" in (said() or "")) == (number == 2)
    assert len(tried) == 3
