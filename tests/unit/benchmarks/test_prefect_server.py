"""What is counted of a server: requests by kind, and rows."""

import sqlite3
from pathlib import Path

import pytest

from benchmarks.prefect_server import ROW_TABLES, Server, wait_until

LOG = """INFO:     Uvicorn running on http://127.0.0.1:4871 (Press CTRL+C to quit)
INFO:     127.0.0.1:43948 - "GET /api/health HTTP/1.1" 200 OK
INFO:     127.0.0.1:1 - "GET /api/flow_runs/6d1b1d4e-0a0b-4c0d-8e0f-0123456789ab HTTP/1.1" 200 OK
INFO:     127.0.0.1:1 - "POST /api/flow_runs/0a1b1d4e-0a0b-4c0d-8e0f-0123456789ab/set_state HTTP/1.1" 201 Created
INFO:     127.0.0.1:1 - "GET /api/csrf-token?client=6d1b1d4e-0a0b-4c0d-8e0f-0123456789ab HTTP/1.1" 422 No
INFO:     127.0.0.1:1 - "GET /api/flow_runs/7d1b1d4e-0a0b-4c0d-8e0f-0123456789ab HTTP/1.1" 503 No
"""


@pytest.fixture
def server(tmp_path: Path) -> Server:
    log, database = tmp_path / "server.log", tmp_path / "prefect.db"
    log.write_text(LOG)
    with sqlite3.connect(database) as connection:
        for table in ROW_TABLES:
            connection.execute(f"CREATE TABLE {table} (id INTEGER)")
        connection.execute("INSERT INTO log VALUES (1), (2)")
    connection.close()
    return Server("http://127.0.0.1:1/api", log, database, 1.0)


def test_requests_are_counted_by_kind(server: Server) -> None:
    assert server.requests() == {
        "GET /api/health": 1,
        "GET /api/flow_runs/ID": 2,
        "POST /api/flow_runs/ID/set_state": 1,
        "GET /api/csrf-token": 1,
    }


def test_rows_and_bytes_are_counted(server: Server) -> None:
    rows = server.rows()
    assert rows["log"] == 2
    assert rows["events"] == 0
    assert rows["bytes"] == server.database.stat().st_size


def test_looks_are_counted() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), "it is so") == 3
