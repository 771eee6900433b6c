"""Runs as Jobs of a cluster, and the example manifests, against the schemas of Kubernetes."""

import json
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from deployments.deploy import FILES, POOLS
from tests.unit.deployments.test_files import DEPLOYMENTS, EXAMPLES, require_command, require_known

EXAMPLE = EXAMPLES / "kubernetes"
KUBERNETES = "1.32"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((EXAMPLE / name).read_text())
]
WORKLOADS = [item for item in OBJECTS if item["kind"] in ("Deployment", "StatefulSet")]


def require_restricted(pod: dict[str, Any]) -> None:
    """What the pod security standard "restricted" asks for, and a read-only root."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {volume["name"] for volume in pod["volumes"]} | {"data"}  # the one of a StatefulSet
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@pytest.mark.anyio
@pytest.mark.parametrize("item", DEPLOYMENTS, ids=lambda item: f"{item['entrypoint']} {item['name']}")
async def test_a_run_is_a_valid_job_that_asks_for_what_its_pool_is_for(item: dict[str, Any]) -> None:
    """As Prefect's worker starts it."""
    pool = item["work_pool"]
    values = {**pool["job_variables"], "image": "registry/virnuc:1", "node_selector": {"gpu": "h100"}}
    configuration = await KubernetesWorkerJobConfiguration.from_template_and_values(
        json.loads((FILES / "kubernetes.json").read_text()),
        values,
        client=PrefectClient("http://127.0.0.1:9/api"),
    )
    configuration.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="contigs.fa lane 3 of 12"))
    job = configuration.job_manifest
    pod = job["spec"]["template"]["spec"]
    # Prefect wants both here, where Kubernetes passes over them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    require_restricted(pod)
    [container] = pod["containers"]
    assert container["image"] == "registry/virnuc:1"
    assert [*container["command"], *container["args"]] == ["/usr/bin/env", "prefect", "flow-run", "execute"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (
        1 if pool["name"] == "virnuc-gpu" else None
    )
    assert container["resources"]["requests"]["cpu"] == pool["job_variables"]["cpu"]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment.items() >= pool["job_variables"]["env"].items()
    assert environment["HF_HOME"] == "/data/huggingface"


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']} {item['metadata']['name']}")
def test_manifest_is_valid_and_holds_no_password(item: dict[str, Any]) -> None:
    kubernetes_validate.validate(item, KUBERNETES, strict=True)
    assert item["kind"] != "Secret"


def test_every_manifest_is_listed() -> None:
    assert {path.name for path in EXAMPLE.glob("*.yaml")} == {
        "kustomization.yaml",
        *KUSTOMIZATION["resources"],
    }


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda item: item["metadata"]["name"])
def test_workload_is_restricted_watched_and_runs_what_there_is(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    require_restricted(pod)
    for container in pod["containers"]:
        assert container["livenessProbe"]
        if container["image"] == "virnuc":
            require_command(container["command"])
        for variable in container.get("env", ()):
            name = variable["name"]
            assert "valueFrom" in variable or not ("PASSWORD" in name or "AUTH" in name)
            if container["image"] == "virnuc" and name not in ("POSTGRES_PASSWORD", "HOME"):
                require_known(name)


def test_there_is_a_worker_for_each_pool_with_a_port_of_its_own() -> None:
    [workers] = [item for item in WORKLOADS if item["metadata"]["name"] == "workers"]
    started = workers["spec"]["template"]["spec"]["containers"]
    assert {container["command"][4] for container in started} == {f"--pool={pool}" for pool in POOLS}
    ports = [container["env"][0]["value"] for container in started]
    assert len(set(ports)) == len(started)
    assert ports == [str(container["livenessProbe"]["httpGet"]["port"]) for container in started]
