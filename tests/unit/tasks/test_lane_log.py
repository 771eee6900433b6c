"""The log file of a lane."""

import logging
from pathlib import Path

import pytest

from tasks import lane_log
from tasks.lane_log import recording_log

LOG = logging.getLogger("virnuc_core.made")


def test_log_is_kept_small_and_has_the_newest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_log, "MAX_BYTES", 1000)
    path = tmp_path / "lane-0000-a.log"
    with recording_log(path):
        for number in range(100):
            LOG.warning("line %d", number)
    LOG.warning("after the lane")
    files = list(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in files) <= 2000
    assert path.read_text().splitlines()[-1].endswith("WARNING virnuc_core.made: line 99")


def test_a_lane_goes_on_without_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with recording_log(tmp_path / "file" / "lane-0000-a.log"):
        LOG.warning("a line")
    assert "Traceback" not in capfd.readouterr().err
