"""Terminal output: progress and warnings on stderr while a command runs, and its result on stdout."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tasks.progress import LaneProgress, use_progress

if TYPE_CHECKING:  # slow, and for terminals alone
    from rich.console import Console
    from rich.progress import Progress, TaskID

OutputMode = Literal["human", "quiet", "json"]


def stage_in_words(name: str) -> str:
    words = {
        "fetch": "downloading the input",
        "index": "reading sequences",
        "plan": "planning the run",
        "validate": "checking finished shards",
        "embed": "computing embeddings",
        "claim": "reserving the output",
        "aggregate": "collecting embeddings",
        "classify": "classifying sequences",
        "publish": "writing results",
        "deliver": "uploading results",
        "label": "reading labels",
        "divide": "splitting training and test sets",
        "fit": "training the classifier head",
        "measure": "measuring accuracy",
        "publish_training": "writing the model card",
        "publish_evaluation": "writing the evaluation",
    }
    return words.get(name, name)


class LineProgress:
    """Plain lines, for logs."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print = print_line
        self._lock = threading.Lock()
        self._next_line: dict[int, float] = {}

    def stage(self, name: str) -> None:
        self._print(f"virnuc: {stage_in_words(name)}")

    def lane(self, progress: LaneProgress) -> None:
        """Prints a lane every 30 s, and when it is done: a line per shard would flood a log."""
        now = time.monotonic()
        with self._lock:
            is_due = now >= self._next_line.setdefault(progress.lane, now + 30.0)
            if is_due or progress.rows_done == progress.rows_total:
                self._next_line[progress.lane] = now + 30.0
                self._print(f"virnuc: {progress}")


class BarProgress:
    """Terminal progress bars: one for the stage, one per lane."""

    def __init__(self, bars: "Progress") -> None:
        self._bars = bars
        self._stage = bars.add_task("starting", total=None)
        self._lanes: dict[int, TaskID] = {}

    def stage(self, name: str) -> None:
        self._bars.update(self._stage, description=stage_in_words(name))

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


def progress_bars(console: "Console") -> "Progress":
    """The bars, which go when they are done."""
    from rich import progress

    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class _LogHandler(logging.Handler):
    """Warnings as lines, above any bars."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._print = print_line

    def emit(self, record: logging.LogRecord) -> None:
        self._print(f"virnuc: {record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def terminal(mode: OutputMode) -> Iterator[None]:
    """Shows progress of the block, and warnings of virnuc's own packages, on stderr."""
    with ExitStack() as stack:
        print_line: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)
        if mode != "human":
            stack.enter_context(use_progress(LineProgress(lambda _: None)))
        elif sys.stderr and sys.stderr.isatty():
            from rich.console import Console

            console = Console(stderr=True)
            bars = stack.enter_context(progress_bars(console))
            stack.enter_context(use_progress(BarProgress(bars)))
            print_line = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        else:

            def print_line(line: str) -> None:
                print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

            stack.enter_context(use_progress(LineProgress(print_line)))
        handler = _LogHandler(print_line)
        for name in ("virnuc_core", "tasks", "flows"):
            logger = logging.getLogger(name)
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        yield


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
