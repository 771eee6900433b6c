"""Work pools of type kubernetes: their Jobs, and the example manifests, against the schemas of Kubernetes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

import deployments
from deployments.pools import PoolChoice
from deployments.register import PREFECT_FILE
from deployments.server import CPU_POOL, GPU_POOL, POOLS, RUNS_POOL
from tests.unit.deployments.test_files import require_command, require_known
from virnuc_core.errors import UsageError

EXAMPLE = Path(deployments.__file__).parent / "examples" / "kubernetes"
KUBERNETES = "1.32"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((EXAMPLE / name).read_text())
]
WORKLOADS = [item for item in OBJECTS if item["kind"] in ("Deployment", "StatefulSet")]


async def job_of_lane(pool: str, *job_variables: str) -> dict[str, Any]:
    """The Job that Prefect's worker starts for a lane."""
    template = PoolChoice(type="kubernetes", job_variables=job_variables).template(pool, None)
    [values] = [
        item["work_pool"]["job_variables"]
        for item in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]
        if item["work_pool"]["name"] == GPU_POOL and item["entrypoint"] == "flows.lanes.embed_lane"
    ]
    no_server = PrefectClient("http://127.0.0.1:9/api")
    configuration = await KubernetesWorkerJobConfiguration.from_template_and_values(
        template, dict(values), client=no_server
    )
    configuration.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="lane-0 3 shards"))
    return configuration.job_manifest


def valid_pod(job: dict[str, Any]) -> dict[str, Any]:
    """The pod of a Job that Kubernetes accepts."""
    pod = job["spec"]["template"]["spec"]
    # Prefect wants both here, where Kubernetes passes over them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    return pod


@pytest.mark.anyio
async def test_a_lane_on_gpus_is_a_valid_job() -> None:
    job = await job_of_lane(
        GPU_POOL,
        "image=registry.example.org/virnuc:1",
        "folder=/shared",
        'virnuc-gpu.node_selector={"gpu": "h100"}',
        "virnuc-cpu.cpu=64",
    )
    pod = valid_pod(job)
    [container] = pod["containers"]
    assert container["image"] == "registry.example.org/virnuc:1"
    assert [*container["command"], *container["args"]] == [
        "/usr/bin/env",
        "python",
        "-m",
        "deployments.engine",
    ]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["resources"]["requests"]["cpu"] == "4"
    assert pod["nodeSelector"] == {"gpu": "h100"}
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["VIRNUC_HOME"] == "/var/lib/virnuc"
    assert environment["HF_HOME"] == "/shared/huggingface"
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "60"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts["/shared"] == "shared"
    assert require_restricted(pod)


@pytest.mark.anyio
@pytest.mark.parametrize("pool", [CPU_POOL, RUNS_POOL])
async def test_other_pools_ask_for_no_gpu(pool: str) -> None:
    [container] = valid_pod(await job_of_lane(pool))["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_job_variables_change_the_pools_they_name_and_keep_what_others_set() -> None:
    made = PoolChoice(type="kubernetes", job_variables=("cpu=8", "virnuc-gpu.gpus=2")).template(
        GPU_POOL, None
    )
    again = PoolChoice(job_variables=("memory=64Gi",)).template(GPU_POOL, made)
    defaults = {name: field.get("default") for name, field in again["variables"]["properties"].items()}
    assert (defaults["cpu"], defaults["gpus"], defaults["memory"]) == ("8", 2, "64Gi")
    unchanged = PoolChoice(type="kubernetes").template(CPU_POOL, None)
    assert (
        PoolChoice(type="kubernetes", job_variables=("virnuc-gpu.gpus=2",)).template(CPU_POOL, None)
        == unchanged
    )


@pytest.mark.parametrize("text", ["gpus", "virnuc-tpu.gpus=1", "gpu=1"])
def test_a_job_variable_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--job-variable {text.partition('=')[0]}"):
        PoolChoice(type="kubernetes", job_variables=(text,)).template(GPU_POOL, None)


def containers(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pod = workload["spec"]["template"]["spec"]
    yield from pod.get("initContainers", ())
    yield from pod["containers"]


def require_restricted(pod: dict[str, Any]) -> bool:
    """What the pod security standard "restricted" asks for, and a read-only root."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
    return True


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']} {item['metadata']['name']}")
def test_manifest_is_valid(item: dict[str, Any]) -> None:
    kubernetes_validate.validate(item, KUBERNETES, strict=True)


def test_every_manifest_is_listed() -> None:
    assert {path.name for path in EXAMPLE.glob("*.yaml")} == {
        "kustomization.yaml",
        *KUSTOMIZATION["resources"],
    }
    [namespace] = [item for item in OBJECTS if item["kind"] == "Namespace"]
    assert KUSTOMIZATION["namespace"] == namespace["metadata"]["name"]
    [image] = KUSTOMIZATION["images"]
    [deploy] = [one for item in WORKLOADS for one in containers(item) if one["name"] == "deploy"]
    # kustomize changes no arguments.
    assert f"--job-variable=image={image['newName']}:{image['newTag']}" in deploy["command"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda item: item["metadata"]["name"])
def test_workload_is_restricted_watched_and_runs_what_there_is(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    assert require_restricted(pod)
    volumes = {volume["name"] for volume in (*pod["volumes"], *claims(workload))}
    for container in containers(workload):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        if container["image"] == "virnuc":
            require_command(container["command"])
            for variable in container.get("env", ()):
                if variable["name"] not in ("POSTGRES_PASSWORD", "HOME"):
                    require_known(variable["name"])
        assert container["name"] == "deploy" or container["livenessProbe"]


def claims(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [claim["metadata"] for claim in workload["spec"].get("volumeClaimTemplates", ())]


def test_there_is_a_worker_for_each_pool_with_a_port_of_its_own() -> None:
    [workers] = [item for item in WORKLOADS if item["metadata"]["name"] == "workers"]
    started = [container for container in containers(workers) if container["name"] != "deploy"]
    assert {container["command"][4] for container in started} == {f"--pool={pool}" for pool in POOLS}
    ports = [container["env"][0]["value"] for container in started]
    assert len(set(ports)) == len(started)
    assert ports == [str(container["livenessProbe"]["httpGet"]["port"]) for container in started]


def test_no_manifest_holds_a_password() -> None:
    assert not [item for item in OBJECTS if item["kind"] == "Secret"]
    for workload in WORKLOADS:
        for container in containers(workload):
            for variable in container.get("env", ()):
                if "PASSWORD" in variable["name"] or "AUTH" in variable["name"]:
                    assert "secretKeyRef" in variable["valueFrom"]
