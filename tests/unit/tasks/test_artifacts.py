"""Artifacts against a server of a few lines that keeps what it is sent, and against none."""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import UUID

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import artifacts
from tasks.artifacts import ProgressArtifact, show_link, show_markdown, show_table

# Prefect would rather have them made in a flow; tests with a real server do that.
pytestmark = pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow:FutureWarning")

ARTIFACT_ID = UUID(int=7)


class Server(ThreadingHTTPServer):
    """Takes artifacts, or, while it is ill, answers with an error of its own.

    Attributes:
        taken: method and body of every request for an artifact.
        refused: how many requests for an artifact it has failed.
        is_ill: whether it fails.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.taken: list[tuple[str, dict[str, object]]] = []
        self.refused = 0
        self.is_ill = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api"


class _Answer(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self._take("POST", 201)

    def do_PATCH(self) -> None:
        self._take("PATCH", 204)

    def do_GET(self) -> None:
        self._send(404, b"{}")

    def _take(self, method: str, status: int) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.is_ill:
            self.server.refused += 1
            self._send(503, b"{}")
            return
        self.server.taken.append((method, body))
        answer = {"id": str(ARTIFACT_ID), "created": None, "updated": None, **body}
        self._send(status, json.dumps(answer).encode() if status == 201 else b"")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with temporary_settings({PREFECT_API_URL: server.url}):
                yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_bar_begins_at_nothing_and_moves_now_and_then(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = ProgressArtifact("virnuc-lane-0", "Lane 0")
    for percent in (10, 20, 30):
        bar.update(percent)
    bar.update(100)
    assert [(method, body["data"]) for method, body in server.taken] == [("POST", 0.0), ("PATCH", 100.0)]
    assert server.taken[0][1]["key"] == "virnuc-lane-0"
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_UPDATES", 0.0)
    bar.update(100)
    bar.update(50)
    assert [body["data"] for _, body in server.taken[2:]] == [100.0, 50.0]


def test_server_that_fails_costs_one_try_and_one_warning(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_ill = True
    bar = ProgressArtifact("virnuc-lane-0", "Lane 0")
    bar.update(50)
    bar.update(100)
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_TRIALS", 0.0)
    bar._not_before = 0.0
    assert server.refused == 1
    bar.update(60)
    assert server.refused == 2
    assert [record.levelno for record in caplog.records if record.name == artifacts.__name__] == [
        logging.WARNING
    ]
    server.is_ill = False
    bar.update(70)
    assert [body["data"] for _, body in server.taken] == [70.0]


def test_pages_are_shown(server: Server) -> None:
    show_markdown("virnuc-summary", "# verdict", "in short")
    show_table("virnuc-lanes", [{"lane": 0}])
    show_link("virnuc-mlflow", "http://mlflow.example", "This run in MLflow")
    kinds = [(body["key"], body["type"]) for _, body in server.taken]
    assert kinds == [("virnuc-summary", "markdown"), ("virnuc-lanes", "table"), ("virnuc-mlflow", "markdown")]
    assert server.taken[0][1]["description"] == "in short"
    assert json.loads(str(server.taken[1][1]["data"])) == [{"lane": 0}]
    assert "http://mlflow.example" in str(server.taken[2][1]["data"])


def test_server_that_is_gone_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        url = server.url
    with temporary_settings({PREFECT_API_URL: url}):
        show_markdown("virnuc-summary", "# verdict")
    assert "takes no artifact" in caplog.text
