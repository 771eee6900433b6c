"""The flows of lanes, each of which computes some of a run's shards on one device."""

import logging
import os
import socket
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.runtime import flow_run

from tasks.artifacts import attach_api_log_handler
from tasks.local_lanes import compute_lane, own_device, working_in
from tasks.stages import plan
from virnuc_core.env_config import env
from virnuc_core.inference.events import LaneStarted
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import Kind
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig

_log = logging.getLogger(__name__)


def lane_name() -> str:
    """Number and device of a lane, "lane-0-cuda:1", or in a pool its size, "lane-12 9 shards"."""
    parameters: dict[str, Any] = flow_run.parameters
    if parameters.get("token"):
        return f"lane-{parameters['lane']} {len(parameters['shards'])} shards"
    return f"lane-{parameters['lane']}-{parameters['device']}"


def plan_name() -> str:
    """Such as "plan my-results"."""
    return f"plan {Path(flow_run.parameters['folder']).name}"


def plan_journal_name(run_id: str | UUID) -> str:
    """Journal of a planning run."""
    return f"plan-{str(run_id)[:8]}"


@flow(name="embed-lane", flow_run_name=lane_name, persist_result=False)
def embed_lane(
    folder: str, shards: tuple[int, ...], lane: int, device: str, num_lanes: int = 1, token: str | None = None
) -> None:
    """Computes some of a run's shards on one device, and keeps a journal and a log of it in the run's folder.

    Args:
        folder: the run's folder, with its plan and frame store.
        shards: which of the plan's shards; those that are there already are left out.
        lane: number of this lane, from 0.
        device: "cpu" or "cuda:N"; "cuda" is the GPU that this process sees.
        num_lanes: lanes that share this machine's CPU threads with this one, itself included.
        token: that of the run, in a pool: this host must see the same folder.
    """
    attach_api_log_handler()
    compute_lane(folder, shards, lane, device, num_lanes, token, flow_run.id)


@flow(name="plan-run", flow_run_name=plan_name, persist_result=False)
def plan_run(folder: str, config: RunConfig, kind: Kind, device: str, token: str | None = None) -> None:
    """Plans a run on the hardware that will compute it.

    Args:
        folder: the run's folder, with its frame store.
        config: settings as asked for.
        kind: what the run is to give.
        device: as for `embed_lane`.
        token: as for `embed_lane`.
    """
    attach_api_log_handler()
    run = RunFolder(Path(folder))
    journal = LaneJournal(run.lane_journal(plan_journal_name(flow_run.id)))
    with working_in(run, token, journal, lane=0):
        own = own_device(device)
        gpus = query_gpus(["index"], units=False) if device == "cuda" else ()
        host, pid = socket.gethostname(), os.getpid()
        journal.write(
            LaneStarted(lane=0, device=own, host=host, pid=pid, shards=(), devices_of_host=len(gpus) or 1)
        )
        if others := [name for name in env().switches if name not in (config.switches or ())]:
            _log.warning(
                "%s is set for this worker and does not count: set it where the run is asked for",
                ", ".join(others),
            )
        plan(run, config, kind, (own,), token)
