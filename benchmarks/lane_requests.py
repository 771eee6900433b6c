"""Requests that the parent of a run in a pool sends to the server, for lanes without work.

    python -m benchmarks.lane_requests --commit $(git rev-parse --short HEAD) [--lanes 2000]

The server, its log of requests and the parent are real. In place of workers, a client takes waiting lanes and completes
them at once; its requests are not counted. Adds its figures to benchmarks/results/lane_requests.json, beside those of
other versions of virnuc.
"""

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from benchmarks.lane_overhead import Server, plan_a_run, serving, wait_until
from benchmarks.reports import Json, options_of, print_and_write
from virnuc_core.inference.plan import Shard, read_plan, write_plan
from virnuc_core.run_folder import RunFolder

_LANE_MINUTES: Final = 10.0
_POOL: Final = "virnuc-cpu"
_SECONDS_BETWEEN_POLLS: Final = 0.5


class IdleWorker(threading.Thread):
    """Completes every lane that waits in the pool, at once; `requests` counts its own."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.requests: Counter[str] = Counter()
        self._client = httpx.Client(base_url=url, timeout=60.0)
        self._over = threading.Event()

    def __enter__(self) -> "IdleWorker":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Polls as a worker does."""
        while not self._over.wait(_SECONDS_BETWEEN_POLLS):
            path = f"/work_pools/{_POOL}/get_scheduled_flow_runs"
            for found in self._post(path, path, {"limit": 200}) or ():
                self._complete(found["flow_run"])

    def _complete(self, run: Json) -> None:
        folder = RunFolder(Path(run["parameters"]["folder"]))
        for shard in run["parameters"]["shards"]:
            folder.shard(shard).touch()
        body = {"state": {"type": "COMPLETED"}, "force": True}
        self._post(f"/flow_runs/{run['id']}/set_state", "/flow_runs/ID/set_state", body)

    def _post(self, path: str, name: str, body: Json) -> Any:
        """None if the server is busy: the lane is still there at the next poll."""
        self.requests[f"POST /api{name}"] += 1
        try:
            response = self._client.post(path, json=body)
        except httpx.TransportError:
            return None
        return response.json() if response.is_success else None


def with_lanes(folder: RunFolder, number: int) -> RunFolder:
    """Plans shards that are lanes of their own."""
    seconds = 60 * _LANE_MINUTES
    shards = tuple(Shard(index=i, begin=i, end=i + 1, cost=seconds) for i in range(number))
    write_plan(folder.plan, replace(read_plan(folder.plan), shards=shards))
    folder.shards.mkdir()
    return folder


def parent_requests(server: Server, folder: RunFolder, lanes: int) -> Json:
    """Requests of a parent by kind, and its seconds."""
    from prefect import flow

    from flows.pool import PoolLanes
    from virnuc_core.settings import LaneSettings

    @flow(name="parent", persist_result=False)
    def parent() -> None:
        """The part of a run that has lanes."""
        PoolLanes(LaneSettings(mode="pool", lane_minutes=_LANE_MINUTES), ("cpu",)).compute(folder)

    before, begin = server.requests(), time.perf_counter()
    with IdleWorker(server.url) as worker:
        parent()
        took = time.perf_counter() - begin
    wait_until(lambda: len(list(folder.shards.iterdir())) == lanes, "all lanes are done")
    requests = server.requests() - before - worker.requests
    return {"seconds": took, "requests": dict(requests.most_common()), "in_all": sum(requests.values())}


def main() -> None:
    """Command line."""
    parser = options_of("lane_requests", __doc__)
    parser.add_argument("--lanes", type=int, default=2000)
    parser.add_argument("--port", type=int, default=4872)
    parser.add_argument("--commit", required=True, help="the version of virnuc that is measured")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="virnuc-requests-") as scratch:
        folder = with_lanes(plan_a_run(Path(scratch) / "run"), arguments.lanes)
        with serving(Path(scratch), arguments.port) as server:
            found = {"lanes": arguments.lanes, **parent_requests(server, folder, arguments.lanes)}
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    print_and_write({**report, arguments.commit: found}, arguments.out)


if __name__ == "__main__":
    main()
