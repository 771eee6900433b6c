"""Which runs the screenshots show, and the contigs of those of reports."""

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from scripts.screenshots import PASTED, find_mlflow_runs, find_prefect_run, write_pasted


class Server(ThreadingHTTPServer):
    """Canned responses by path."""

    answers: Mapping[str, Any] = {}


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


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def mlflow_run(run_id: str, *tags: str) -> dict[str, Any]:
    return {"info": {"run_id": run_id}, "data": {"tags": [{"key": tag, "value": "x"} for tag in tags]}}


def test_newest_run_and_its_artifacts(server: Server) -> None:
    server.answers = {
        "/api/flow_runs/filter": [{"id": "run"}],
        "/api/artifacts/filter": [{"key": "virnuc-summary", "id": "page"}],
    }
    run = find_prefect_run(address(server))
    assert (run.id, run.artifacts) == ("run", {"virnuc-summary": "page"})


def test_lanes_are_not_compared_with_runs(server: Server) -> None:
    server.answers = {
        "/api/2.0/mlflow/experiments/get-by-name": {"experiment": {"experiment_id": "3"}},
        "/api/2.0/mlflow/runs/search": {
            "runs": [
                mlflow_run("lane", "mlflow.parentRunId"),
                mlflow_run("new", "virnuc.out"),
                mlflow_run("old"),
            ]
        },
    }
    runs = find_mlflow_runs(address(server))
    assert (runs.experiment_id, runs.run_ids) == ("3", ("new", "old"))


def test_without_a_run_there_is_nothing_to_show(server: Server) -> None:
    server.answers = {
        "/api/flow_runs/filter": [],
        "/api/2.0/mlflow/experiments/get-by-name": {"experiment": {"experiment_id": "3"}},
        "/api/2.0/mlflow/runs/search": {},
    }
    with pytest.raises(SystemExit, match="no finished run"):
        find_prefect_run(address(server))
    with pytest.raises(SystemExit, match="no finished run"):
        find_mlflow_runs(address(server))


def write_records(path: Path, names: set[str]) -> None:
    path.write_text(
        "".join(
            f">{name} made\n{letter * 70_000}\n"
            for name, letter in zip(sorted(names), "ACGT" * 9, strict=False)
        )
    )


def test_parts_follow_one_another(tmp_path: Path) -> None:
    names = {name for parts in PASTED.values() for name, _, _ in parts}
    write_records(tmp_path / "val.fa", names)
    write_pasted(tmp_path / "val.fa", tmp_path / "out.fa")
    lines = (tmp_path / "out.fa").read_text().splitlines()
    made = dict(zip((line[1:] for line in lines[::2]), lines[1::2], strict=True))
    assert list(made) == list(PASTED)
    assert len(made["A_johnsonii_with_crAss-like_phage"]) == 65_000
    for contig, parts in PASTED.items():
        assert len(made[contig]) == sum(last - first + 1 for _, first, last in parts)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    write_records(tmp_path / "val.fa", {"k149_60461"})
    with pytest.raises(SystemExit, match=r"has no record .*k149_27590"):
        write_pasted(tmp_path / "val.fa", tmp_path / "out.fa")
