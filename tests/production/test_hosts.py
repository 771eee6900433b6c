"""Several hosts with one shared folder: each has its own name, machine id, network and VIRNUC_HOME."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

from tests.end_to_end.conftest import wait_until
from tests.production.conftest import Server, answers, free_port, same_results
from tests.production.made_hosts import MadeHost, made_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(frozen=True, kw_only=True)
class Cluster(Server):
    """A server and runs on the host `head`, and lanes on two hosts of the same name."""

    nodes: list[MadeHost]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    port = free_port()
    with made_hosts(["head", "node", "node"], tmp_path, port) as (head, *nodes):
        serve = ("prefect", "server", "start", "--host", head.address, "--port", str(port))
        own = {"PREFECT_HOME": str(head.home / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        head.start(*serve, **own)
        wait_until(lambda: answers(head.server), 120)
        assert head.start("virnuc_cli", "server", "deploy").wait(300) == 0, head.log.read_text()
        head.start("virnuc_cli", "server", "worker", "--devices", "none", "--runs", "2")
        for node in nodes:
            node.start("virnuc_cli", "server", "worker", "--devices", "cpu", "--runs", "0")
        with SyncPrefectClient(head.server) as client:
            pools = ("virnuc-runs", "virnuc-cpu", "virnuc-cpu")
            wait_until(
                lambda: all(len(client.read_workers_for_work_pool(p)) == pools.count(p) for p in pools), 300
            )
            yield Cluster(client=client, nodes=nodes)


def test_a_host_dies_and_its_namesake_goes_on(
    cluster: Cluster, genomes: Path, local_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shared" / "run"
    run_id = cluster.ask(inputs=[str(genomes)], out=str(out))

    def at_work() -> dict[str, FlowRun] | None:
        """A running lane of each node, by worker."""
        running = {
            str(run.labels["prefect.worker.name"]): run
            for run in cluster.lanes(run_id)
            if run.state_name == "Running"
        }
        return running if len(running) == 2 else None

    dying, living = wait_until(at_work, 300).items()
    victim = next(node for node in cluster.nodes if dying[0] in node.log.read_text())
    victim.die()
    cluster.wait_for(run_id, "Completed", 700)
    states = {run.id: run.state_name for run in cluster.lanes(run_id)}
    assert states[living[1].id] == "Completed"
    assert states[dying[1].id] == "Crashed"
    assert same_results(out, local_run)
