import io
import logging
import re

import pytest
from rich.console import Console

from tasks.progress import LaneProgress, current_progress
from virnuc_cli.terminal import BarProgress, LineProgress, progress_bars, terminal


def lane(done: int, total: int = 100, number: int = 0) -> LaneProgress:
    return LaneProgress(lane=number, device="cpu", rows_done=done, rows_total=total)


def test_lines_are_few_and_the_last_one_is_there() -> None:
    lines: list[str] = []
    progress = LineProgress(lines.append)
    progress.stage("embed")
    for done in range(101):
        progress.lane(lane(done))
    assert lines == ["virnuc: computing embeddings", "virnuc: lane 0 on cpu: 100% (100 of 100 rows)"]


def test_bars_show_every_lane_until_it_is_done() -> None:
    screen = io.StringIO()
    with progress_bars(Console(file=screen, force_terminal=True, width=120)) as shown:
        bars = BarProgress(shown)
        bars.stage("embed")
        bars.lane(lane(10))
        bars.lane(lane(20, number=1))
        bars.lane(lane(50))
        shown.refresh()
        assert all(text in screen.getvalue() for text in ("computing embeddings", "lane 0 cpu", "lane 1 cpu"))
        bars.lane(lane(100))
        screen.seek(0)
        screen.truncate()
    assert "lane 0 cpu" not in screen.getvalue()
    assert "lane 1 cpu" in screen.getvalue()


def test_warnings_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal("quiet"):
        logging.getLogger("virnuc_core.somewhere").warning("a %s that is rather long " * 8, *["word"] * 8)
        logging.getLogger("virnuc_core.somewhere").info("not shown")
        current_progress().stage("not shown")
        current_progress().lane(lane(1))
    logging.getLogger("virnuc_core.somewhere").warning("not shown any more")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("virnuc: warning: a word")


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal("human"):
        current_progress().stage("index")
    assert re.fullmatch(r"\d\d:\d\d:\d\d virnuc: reading sequences\n", capsys.readouterr().err)
