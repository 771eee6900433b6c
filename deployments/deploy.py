"""`virnuc server deploy`: work pools, deployments and automations, as the files of this folder or of a site's own say."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import PrefectHTTPStatusError
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from flows import CPU_POOL, GPU_POOL, RUNS_POOL
from tasks.artifacts import RUN_TAG
from tasks.server import server_failure, server_url
from virnuc_core import __version__
from virnuc_core.env_config import child_environment
from virnuc_core.errors import UsageError, VirnucError

PoolType = Literal["process", "kubernetes"]

FILES: Final = Path(__file__).parent
# Planning takes seconds and goes first, so that a new run does not wait for the lanes of others.
_LANE_QUEUES: Final = ("plans", "urgent", "normal", "bulk")
# Work pools and their queues, by falling priority.
POOLS: Final[Mapping[str, tuple[str, ...]]] = {
    GPU_POOL: _LANE_QUEUES,
    CPU_POOL: _LANE_QUEUES,
    RUNS_POOL: ("urgent", "normal", "bulk"),
}

_Parsed = TypeVar("_Parsed")


def deploy(site: Path | None = None, pool_type: PoolType | None = None) -> list[str]:
    """Creates or updates everything at the server of Prefect's settings, and says what.

    Args:
        site: folder of the site's own files, made as copies of virnuc's unless it has a prefect.yaml; None for virnuc's.
        pool_type: of new work pools, "process" by default.

    Raises:
        UsageError: no server answers, a file cannot be used, or a work pool is of another type.
        VirnucError: the server refuses something.
    """
    if site and not (site / "prefect.yaml").exists():
        site.mkdir(parents=True, exist_ok=True)
        for name in ("prefect.yaml", "automations.yaml", "alarms.yaml", "kubernetes.json"):
            shutil.copyfile(FILES / name, site / name)
    folder = site or FILES
    prefect = folder / "prefect.yaml"
    versions = _read(prefect, lambda document: [item.get("version") for item in document["deployments"]])
    if others := {*map(str, versions)} - {__version__}:
        raise UsageError(
            f"{prefect} is for version {', '.join(others)}, but virnuc {__version__} is installed: adapt it to "
            f"{FILES / prefect.name} and set its version."
        )
    automations = _read(folder / "automations.yaml", _automations) | _read(
        folder / "alarms.yaml", _automations
    )
    if (failure := server_failure()) is not None:
        raise UsageError(
            f"the Prefect server at {server_url()} does not respond ({failure}): start it with `virnuc server up` or "
            "`prefect server start`, or set PREFECT_API_URL to another server."
        )
    with get_client(sync_client=True) as client:
        try:
            pools = [*_make_pools(client, pool_type, folder / "kubernetes.json")]
            _run_prefect_deploy(client, prefect)
            made = f"{len(versions)} deployments of virnuc {__version__}, from {prefect}"
            return [*pools, made, *_apply(client, automations)]
        except PrefectHTTPStatusError as error:
            raise VirnucError(
                f"the Prefect server at {server_url()} rejected the request: {error}"
            ) from error


def _read(path: Path, parse: Callable[[Any], _Parsed]) -> _Parsed:
    try:
        return parse(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is invalid: {error}. Compare it with {FILES / path.name}.") from error


def _automations(document: Any) -> dict[str, AutomationCore]:
    if "BLOCK-ID" in str(document):  # nobody to notify is named
        return {}
    try:
        return {item["name"]: AutomationCore.model_validate(item) for item in document["automations"]}
    except ValidationError as error:  # most of it compares an action with those of other types
        reasons = {
            fault["msg"] for fault in error.errors() if fault["type"] not in ("literal_error", "missing")
        }
        raise ValueError("; ".join(sorted(reasons)) or "an automation has a missing field") from error


def _make_pools(client: SyncPrefectClient, pool_type: PoolType | None, jobs: Path) -> Iterator[str]:
    existing = {pool.name: pool for pool in client.read_work_pools()}
    for name, queues in POOLS.items():
        pool = existing.get(name)
        kind = pool_type or (pool.type if pool else "process")
        if pool and pool.type != kind:
            raise UsageError(
                f"work pool {name} has type {pool.type!r}, which cannot be changed: delete it first with "
                f"`prefect work-pool delete {name}`."
            )
        in_cluster = kind == "kubernetes"
        template = _read(jobs, dict) if in_cluster else ProcessWorker.get_default_base_job_template()
        if pool is None:
            limit = 16 if name == RUNS_POOL else None
            wanted = WorkPoolCreate(name=name, type=kind, base_job_template=template, concurrency_limit=limit)
            client.create_work_pool(wanted)
        elif in_cluster:
            client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
        made = {queue.name for queue in client.read_work_queues(work_pool_name=name)}
        for priority, queue in enumerate(queues, start=1):
            if queue not in made:
                client.create_work_queue(queue, work_pool_name=name, priority=priority)
        yield f"work pool {name} ({kind}), queues {', '.join(queues)}"


def _run_prefect_deploy(client: SyncPrefectClient, path: Path) -> None:
    options = ("--no-prompt", "deploy", "--all", "--prefect-file", str(path.absolute()))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "prefect", *options],
        env=child_environment() | {"PREFECT_API_URL": server_url(), "COLUMNS": "400"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        reason = [line for line in lines if line and not line.startswith(("For further", "For more"))]
        raise UsageError(f"{path} cannot be deployed: {' '.join(reason[-2:])}")
    for found in client.read_deployments():  # Prefect stores parameters that a flow does not have
        unknown = (
            found.parameters.keys() - (found.parameter_openapi_schema or {}).get("properties", {}).keys()
        )
        if unknown and RUN_TAG in found.tags:
            raise UsageError(f"{path}: {found.name} has no parameter {', '.join(sorted(unknown))}.")


def _apply(client: SyncPrefectClient, wanted: Mapping[str, AutomationCore]) -> Iterator[str]:
    """Makes or updates automations, and deletes others of virnuc."""
    existing = {found.name: found for found in client.read_automations()}
    for name, automation in wanted.items():
        before = existing.get(name)
        if before is None:
            client.create_automation(automation)
        # An update forgets which runs are waited for.
        elif AutomationCore.model_validate(before.model_dump(exclude={"id"})) != automation:
            client.update_automation(before.id, automation)
        yield f"automation {name!r}"
    for name in existing.keys() - wanted.keys():
        if name.startswith("virnuc: "):
            client.delete_automation(existing[name].id)
            yield f"automation {name!r} deleted"
