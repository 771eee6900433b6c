"""Terminal output: progress and warnings on stderr while a command runs, and its result on stdout."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from tasks.progress import LaneProgress, use_progress

OutputMode = Literal["human", "quiet", "json"]


class LineProgress:
    """Plain lines on stderr, for logs; with `is_silent`, none."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._lock = threading.Lock()
        self._last_line: dict[int, float] = {}

    def stage(self, name: str) -> None:
        """Prints the stage."""
        self._print(name)

    def lane(self, progress: LaneProgress) -> None:
        """Prints the first and last state of a lane, and others every 10 s: a line per shard would flood a log."""
        now = time.monotonic()
        with self._lock:
            is_due = now - self._last_line.get(progress.lane, -math.inf) >= 10.0
            if is_due or progress.rows_done == progress.rows_total:
                self._last_line[progress.lane] = now
                rows = f"{progress.rows_done} of {progress.rows_total} sequences"
                self._print(f"lane {progress.lane} on {progress.device}: {rows}")

    def _print(self, text: str) -> None:
        if not self._is_silent:
            print(f"virnuc: {text}", file=sys.stderr, flush=True)


class BarProgress:
    """Terminal progress bars: one for the stage, one per lane."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._stage = bars.add_task("starting", total=None)
        self._lanes: dict[int, TaskID] = {}

    def stage(self, name: str) -> None:
        """Relabels the stage's bar."""
        self._bars.update(self._stage, description=name)

    def lane(self, progress: LaneProgress) -> None:
        """Updates a lane's bar, and removes it when the lane is done: a run may have hundreds."""
        if progress.lane not in self._lanes:
            self._lanes[progress.lane] = self._bars.add_task(f"lane {progress.lane} {progress.device}")
        self._bars.update(
            self._lanes[progress.lane],
            completed=progress.rows_done,
            total=progress.rows_total,
            visible=progress.rows_done < progress.rows_total,
        )


def progress_bars(console: Console) -> Progress:
    """The bars, which go when they are done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


class _ConsoleHandler(logging.Handler):
    """Warnings of virnuc's own packages, printed above any bars."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        line = f"virnuc: {record.levelname.lower()}: {record.getMessage()}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def terminal(mode: OutputMode) -> Iterator[None]:
    """Shows progress and warnings of the block on stderr."""
    console = Console(stderr=True)
    handler = _ConsoleHandler(console)
    loggers = [logging.getLogger(name) for name in ("virnuc_core", "tasks", "flows")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        if mode == "human" and console.is_terminal:
            with progress_bars(console) as bars, use_progress(BarProgress(bars)):
                yield
        else:
            with use_progress(LineProgress(is_silent=mode != "human")):
                yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def show(output: OutputMode, document: Mapping[str, Any], summary: str) -> None:
    """Prints the result on stdout in the requested form."""
    if output == "json":
        print(json.dumps(document))
    elif output == "human":
        print(summary)


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ", numbers: Sequence[int] = ()) -> str:
    """Aligns cells in columns, two spaces apart; columns in `numbers` are right-aligned.

    Rows have equal lengths; the first may be a header.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        indent
        + "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
