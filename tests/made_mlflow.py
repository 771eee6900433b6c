"""A real MLflow server that a test stops and starts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


class MlflowServer:
    """Serves a database and artifacts in `folder`, always at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        store = ("--backend-store-uri", f"sqlite:///{self._folder}/server.db")
        files = ("--artifacts-destination", str(self._folder / "files"))
        address = ("--host", "127.0.0.1", "--port", str(self._port), "--workers", "1")
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *store, *files, *address],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        deadline = time.monotonic() + 120
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.HTTPError:
            return False


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
