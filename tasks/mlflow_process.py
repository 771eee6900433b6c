"""MLflow in a process of its own: its import takes longer than a small run, and would hold up this one.

The process reads requests from its stdin and answers on stdout, a line of JSON each, and ends with this process.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import IO, Any, Final

from tasks.mlflow_store import (
    Entry,
    MlflowStore,
    RecordStore,
    StoreError,
    first_line,
    is_refused,
    open_store_early,
)
from virnuc_core.host_memory import without_collection

_NICENESS: Final = 19
_LOGGER: Final = "tasks.mlflow_store"


class StoreProcess:
    """The process, which serves one request at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # only this process handles Ctrl-C: what it records then has to arrive
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns the answer; raises StoreError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with self._turn:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise StoreError("the process that writes to it has ended", is_refusal=False) from error
        for level, line in answer["log"]:
            logging.getLogger(_LOGGER).log(level, "%s", line)
        if answer["error"] is not None:
            raise StoreError(answer["error"], is_refusal=answer["is_refusal"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        with self._turn:
            self._process.kill()  # what it was asked for is done
            self._process.communicate()


class RemoteStore:
    """`MlflowStore` in the process."""

    def __init__(self, process: StoreProcess, record: str) -> None:
        self._process = process
        self._record = record
        self.run_ids: dict[int, str] = {}
        self.open_runs: set[int] = set()
        self.has_warned = False
        self.experiment = ""

    def find_runs(self) -> None:
        """See `MlflowStore.find_runs`."""
        self._ask(None)

    def write(self, entry: Entry) -> None:
        """See `MlflowStore.write`."""
        self._ask(entry)

    def _ask(self, entry: Entry | None) -> None:
        answer = self._process.ask(record=self._record, entry=entry)
        self.run_ids = {int(number): run_id for number, run_id in answer["run_ids"].items()}
        self.open_runs, self.experiment = set(answer["open_runs"]), answer["experiment"]


_current: ContextVar[StoreProcess | None] = ContextVar("store_process", default=None)


@contextmanager
def mlflow_beside() -> Iterator[None]:
    """Has the runs in the block recorded by another process."""
    process = StoreProcess()
    token = _current.set(process)
    try:
        yield
    finally:
        _current.reset(token)
        process.close()


def store_of(record: str) -> RecordStore:
    """The store for a record: in the process of `mlflow_beside`, or in this one."""
    process = _current.get()
    return MlflowStore(record) if process is None else RemoteStore(process, record)


class _Lines(logging.Handler):
    """Keeps log lines for the next answer."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until there are no more; the models come first where cores are few."""
    os.nice(_NICENESS)
    log = _Lines()
    logger = logging.getLogger(_LOGGER)
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    with without_collection():
        open_store_early()
        import_module("matplotlib.figure")  # takes half a second; the figures come at the end of a run
        import_module("matplotlib.backends.backend_agg")
    stores: dict[str, MlflowStore] = {}
    for line in requests:
        request = json.loads(line)
        store = stores.setdefault(request["record"], MlflowStore(request["record"]))
        answer: dict[str, Any] = {"error": None, "is_refusal": False}
        try:
            if request["entry"] is None:
                store.find_runs()
            else:
                store.write(request["entry"])
            answer |= {
                "run_ids": store.run_ids,
                "open_runs": sorted(store.open_runs),
                "experiment": store.experiment,
            }
        except Exception as error:  # noqa: BLE001 - clients of artifact stores raise what their libraries do
            text = first_line(error) or type(error).__name__
            answer |= {"error": text, "is_refusal": is_refused(error)}
        answer["log"], log.lines = log.lines, []
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
