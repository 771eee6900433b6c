"""Progress bars and log lines in Prefect, with a minimal server that records requests, and without a server."""

import json
import logging
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import UUID

import pytest
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import artifacts
from tasks.artifacts import LOGGERS, ProgressArtifact, attach_api_log_handler, show_link, show_markdown

# Prefect warns outside a flow; tests with a real server use flows.
pytestmark = pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow:FutureWarning")


@pytest.fixture(autouse=True)
def _in_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "in_flow", lambda: True)


class Server(ThreadingHTTPServer):
    """Records method and data of every artifact request; answers with an error while `is_ill`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: list[tuple[str, object]] = []
        self.refused = 0
        self.is_ill = False


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.is_ill:
            self.server.refused += 1
            self._send(503, b"{}")
            return
        self.server.taken.append((self.command, body["data"]))
        answer = {"id": str(UUID(int=7)), "created": None, "updated": None, **body}
        if self.command == "POST":
            self._send(201, json.dumps(answer).encode())
        else:
            self._send(204, b"")

    do_PATCH = do_POST

    def do_GET(self) -> None:
        self._send(404, b"{}")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}):
            yield server
        server.shutdown()
        thread.join()


def test_bar_begins_at_nothing_and_moves_now_and_then(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = ProgressArtifact("virnuc-lane-0", "Lane 0")
    for percent in (10, 20, 30, 100):
        bar.update(percent)
    assert server.taken == [("POST", 0.0), ("PATCH", 100.0)]
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_UPDATES", 0.0)
    bar.update(100)
    bar.update(50)
    assert [data for _, data in server.taken[2:]] == [100.0, 50.0]


def test_server_that_fails_costs_one_try_and_one_warning(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_ill = True
    bar = ProgressArtifact("virnuc-lane-0", "Lane 0")
    bar.update(50)
    bar.update(100)
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_TRIALS", 0.0)
    bar._next_update = 0.0
    assert server.refused == 1
    bar.update(60)
    assert server.refused == 2
    assert [record.levelname for record in caplog.records if record.name == artifacts.__name__] == ["WARNING"]
    server.is_ill = False
    bar.update(70)
    show_link("virnuc-mlflow", "http://mlflow.example", "This run in MLflow")
    [(_, percent), (_, link)] = server.taken
    assert percent == 70.0
    assert "http://mlflow.example" in str(link)


def test_server_that_is_gone_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        show_markdown("virnuc-summary", "# verdict")
    assert "takes no artifact" in caplog.text


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    for logger in loggers:
        logger.handlers.clear()
    yield loggers
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_lines_go_to_prefect_once_and_only_those_of_a_run(loggers: list[logging.Logger]) -> None:
    of_prefect = APILogHandler()
    loggers[1].addHandler(of_prefect)
    loggers[0].setLevel(logging.DEBUG)
    attach_api_log_handler()
    attach_api_log_handler()
    for logger in loggers:
        assert logger.isEnabledFor(logging.INFO)
        assert [type(handler) for handler in logger.handlers] == [APILogHandler]
    assert loggers[1].handlers == [of_prefect]
    assert loggers[0].level == logging.DEBUG
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Prefect's, of a line without a run
        loggers[0].getChild("somewhere").info("no run to go to")
