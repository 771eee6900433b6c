"""How many lanes in a row have failed on a device."""

from pathlib import Path

import pytest

from virnuc_core.device_record import count_failures, recording_device, settle_failures
from virnuc_core.errors import DeviceLostError, InputError, LaneError


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "host-gpu0.failures"


def run_lane(record: Path, error: BaseException | None = None) -> None:
    with recording_device(record):
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([None], 0),
        ([DeviceLostError("gone"), LaneError("killed")], 2),
        ([DeviceLostError("gone"), None], 0),
        # Neither says anything of the device.
        ([DeviceLostError("gone"), InputError("no such file"), KeyboardInterrupt()], 1),
    ],
)
def test_failures_of_the_device_count_until_a_lane_succeeds(
    record: Path, ends: list[BaseException | None], expected: int
) -> None:
    assert settle_failures(record) is None
    for error in ends:
        if error is None:
            run_lane(record)
        else:
            with pytest.raises(type(error)):
                run_lane(record, error)
    assert count_failures(record) == settle_failures(record) == expected


def test_a_lane_whose_process_was_killed_has_failed_once_the_next_begins(record: Path) -> None:
    lane = recording_device(record)
    lane.__enter__()
    assert count_failures(record) == 0
    assert settle_failures(record) == settle_failures(record) == 1


def test_a_full_disk_does_not_hide_the_error_of_a_lane(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DeviceLostError):
        run_lane(tmp_path / "absent" / "record", DeviceLostError("gone"))
    assert "cannot be written" in caplog.text
