"""What the user sees: progress and warnings on stderr while a command runs, and its result on stdout."""

import json
import logging
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
    TextColumn,
    TimeRemainingColumn,
)

from tasks.lanes import LaneProgress, use_progress

OutputMode = Literal["human", "quiet", "json"]

# A log file wants a line now and then, not one a shard.
_SECONDS_BETWEEN_LINES = 10.0


class LineProgress:
    """Plain lines on stderr, for logs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_line: dict[int, float] = {}

    def stage(self, name: str) -> None:
        """Prints the stage."""
        print(f"virnuc: {name}", file=sys.stderr, flush=True)

    def lane(self, progress: LaneProgress) -> None:
        """Prints the first and the last state of a lane, and others now and then."""
        now = time.monotonic()
        with self._lock:
            is_due = (
                now - self._last_line.get(progress.lane, -_SECONDS_BETWEEN_LINES) >= _SECONDS_BETWEEN_LINES
            )
            if is_due or progress.rows_done == progress.rows_total:
                self._last_line[progress.lane] = now
                print(
                    f"virnuc: lane {progress.lane} on {progress.device}: "
                    f"{progress.rows_done} of {progress.rows_total} sequences",
                    file=sys.stderr,
                    flush=True,
                )


class BarProgress:
    """Bars on a terminal: one for the stage, one for each lane."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._stage = self._bars.add_task("starting", total=None)
        self._lanes: dict[int, Any] = {}

    def __enter__(self) -> "BarProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, name: str) -> None:
        """Renames the bar of the stage."""
        self._bars.update(self._stage, description=name)

    def lane(self, progress: LaneProgress) -> None:
        """Moves the bar of the lane; it is gone when the lane is done, since a run may have hundreds of them."""
        if progress.lane not in self._lanes:
            self._lanes[progress.lane] = self._bars.add_task(f"lane {progress.lane} {progress.device}")
        self._bars.update(
            self._lanes[progress.lane],
            completed=progress.rows_done,
            total=progress.rows_total,
            visible=progress.rows_done < progress.rows_total,
        )


class SilentProgress:
    """Nothing."""

    def stage(self, name: str) -> None:
        """Says nothing."""

    def lane(self, progress: LaneProgress) -> None:
        """Says nothing."""


class _ConsoleHandler(logging.Handler):
    """Warnings of virnuc's own packages, above the bars where there are any."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record."""
        line = f"virnuc: {record.levelname.lower()}: {record.getMessage()}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def terminal(mode: OutputMode) -> Iterator[None]:
    """Shows the progress and the warnings of what runs inside the block, all of it on stderr."""
    console = Console(stderr=True)
    handler = _ConsoleHandler(console)
    loggers = [logging.getLogger(name) for name in ("virnuc_core", "tasks", "flows")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        if mode != "human":
            with use_progress(SilentProgress()):
                yield
        elif console.is_terminal:
            with BarProgress(console) as bars, use_progress(bars):
                yield
        else:
            with use_progress(LineProgress()):
                yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def show(output: OutputMode, document: Mapping[str, Any], summary: str) -> None:
    """Prints the result on stdout, in the requested form."""
    if output == "json":
        print(json.dumps(document))
    elif output == "human":
        print(summary)


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ", numbers: Sequence[int] = ()) -> str:
    """Rows of cells below one another, two spaces between columns.

    Args:
        rows: of equal lengths; the first may be a heading.
        indent: before each line.
        numbers: columns that are flush right.
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
