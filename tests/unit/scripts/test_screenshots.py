"""Which runs the screenshots show, and the contigs of those of reports."""

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from scripts.screenshots import PASTED, mlflow_screenshots, prefect_screenshots, write_pasted


class Server(ThreadingHTTPServer):
    """Canned responses by path."""

    answers: Mapping[str, Any] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = json.dumps(self.server.answers[self.path.partition("?")[0]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_newest_run_and_its_artifacts(server: Server) -> None:
    server.answers = {
        "/api/flow_runs/filter": [{"id": "run"}],
        "/api/artifacts/filter": [{"key": "virnuc-summary", "id": "page"}],
    }
    pages = {shot.name: shot.url.removeprefix(server.address) for shot in prefect_screenshots(server.address)}
    run = "/runs/flow-run/run"
    assert pages == {
        "prefect-run": run,
        "prefect-artifacts": run,
        "prefect-verdict": "/artifacts/artifact/page",
    }


def test_lanes_are_not_compared_with_runs(server: Server) -> None:
    tags = {"lane": ["mlflow.parentRunId"], "new": ["virnuc.out"], "old": []}
    server.answers = {
        "/api/2.0/mlflow/experiments/get-by-name": {"experiment": {"experiment_id": "3"}},
        "/api/2.0/mlflow/runs/search": {
            "runs": [
                {"info": {"run_id": run}, "data": {"tags": [{"key": key, "value": "x"} for key in keys]}}
                for run, keys in tags.items()
            ]
        },
    }
    runs, metrics, comparison = mlflow_screenshots(server.address)
    assert runs.url.endswith("/#/experiments/3/runs")
    assert metrics.url.endswith("/runs/new/model-metrics")
    assert "runs=%5B%22new%22%2C%20%22old%22%5D&experiments=%5B%223%22%5D" in comparison.url


def test_without_a_run_there_is_nothing_to_show(server: Server) -> None:
    server.answers = {
        "/api/flow_runs/filter": [],
        "/api/2.0/mlflow/experiments/get-by-name": {"experiment": {"experiment_id": "3"}},
        "/api/2.0/mlflow/runs/search": {},
    }
    for screenshots in (prefect_screenshots, mlflow_screenshots):
        with pytest.raises(SystemExit, match="no finished run"):
            next(screenshots(server.address))


def test_pasted_contigs_hold_their_parts(tmp_path: Path) -> None:
    names = sorted({name for parts in PASTED.values() for name, _, _ in parts})
    records = [f">{name} x\n{base * 70_000}\n" for name, base in zip(names, "ACGT" * 9, strict=False)]
    (tmp_path / "val.fa").write_text("".join(records))
    write_pasted(tmp_path / "val.fa", tmp_path / "out.fa")
    lines = (tmp_path / "out.fa").read_text().splitlines()
    made = dict(zip((line[1:] for line in lines[::2]), lines[1::2], strict=True))
    assert list(made) == list(PASTED)
    for contig, parts in PASTED.items():
        assert len(made[contig]) == sum(last - first + 1 for _, first, last in parts)
    (tmp_path / "val.fa").write_text(">k149_60461\nACGT\n")
    with pytest.raises(SystemExit, match=r"has no record .*k149_27590"):
        write_pasted(tmp_path / "val.fa", tmp_path / "out.fa")
