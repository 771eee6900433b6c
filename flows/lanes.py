"""The flows of lanes in a pool, each of which computes some of a run's shards on one device."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.runtime import flow_run

from tasks.artifacts import attach_api_log_handler
from tasks.lane_log import recording_log
from tasks.progress import FlowProgress, LaneRows
from virnuc_core.env_config import env
from virnuc_core.errors import DeviceLostError
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneEvent, LaneStarted
from virnuc_core.inference.lane_journal import LaneJournal, reporting_outcome
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import Kind
from virnuc_core.inference.planning import open_plan
from virnuc_core.retries import retrying
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig

_log = logging.getLogger(__name__)


def lane_name() -> str:
    """Number and size of a lane: "lane-12 9 shards"."""
    parameters: dict[str, Any] = flow_run.parameters
    return f"lane-{parameters['lane']} {len(parameters['shards'])} shards"


def lane_journal_name(lane: int, run_id: str | UUID) -> str:
    """Journal of a lane's run."""
    return f"lane-{lane:04d}-{str(run_id)[:8]}"


def plan_name() -> str:
    """Such as "plan my-results"."""
    return f"plan {Path(flow_run.parameters['folder']).name}"


def plan_journal_name(run_id: str | UUID) -> str:
    """Journal of a planning run."""
    return f"plan-{str(run_id)[:8]}"


@flow(name="embed-lane", flow_run_name=lane_name, persist_result=False)
def embed_lane(folder: str, shards: tuple[int, ...], lane: int, device: str, token: str) -> None:
    """Computes some of a run's shards on one device, and keeps a journal and a log of it in the run's folder.

    Args:
        folder: the run's folder, with its plan and frame store.
        shards: which of the plan's shards; those that are there already are left out.
        lane: number of this lane, from 0.
        device: "cpu" or "cuda:N"; "cuda" is the GPU that this process sees.
        token: that of the run: this host must see the same folder.
    """
    attach_api_log_handler()
    run = RunFolder(Path(folder))
    name = lane_journal_name(lane, flow_run.id)
    journal, rows = LaneJournal(run.lane_journal(name)), LaneRows(FlowProgress())

    def observe(event: LaneEvent) -> None:
        journal.write(event)
        rows(event)

    with _working_in(run, token, journal, lane), recording_log(run.lane_log(name)):
        own = _own_device(device)
        LocalLanes((own,), observe, in_processes=True).compute_lane(run, shards, lane, own)


@flow(name="plan-run", flow_run_name=plan_name, persist_result=False)
def plan_run(folder: str, config: RunConfig, kind: Kind, device: str, token: str) -> None:
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
    with _working_in(run, token, journal, lane=0):
        own = _own_device(device)
        gpus = query_gpus(["index"], units=False) if device == "cuda" else ()
        host, pid = socket.gethostname(), os.getpid()
        journal.write(
            LaneStarted(
                lane=0, device=own, host=host, pid=pid, shards=(), rows=0, devices_of_host=len(gpus) or 1
            )
        )
        if others := [name for name in env().switches if name not in (config.switches or ())]:
            _log.warning(
                "%s is set for this worker and does not count: set it where the run is asked for",
                ", ".join(others),
            )
        store = FrameStore.open(run.frames)
        retrying("plan", partial(open_plan, config, store, kind, (own,), run, token))


@contextmanager
def _working_in(run: RunFolder, token: str, journal: LaneJournal, lane: int) -> Iterator[None]:
    """Opens the journal of a run whose folder this host shares, and records how the block ends."""
    with reporting_outcome(journal):
        run.require_token(token)
        with journal, journal.recording_failure(lane):
            yield


def _own_device(choice: str) -> str:
    """The device of a lane or a plan; DeviceLostError if that is a GPU and this process sees none."""
    if choice != "cuda":
        return choice
    devices = resolve_devices(("auto",))
    if devices == ("cpu",):
        raise DeviceLostError(
            f"this run is planned for GPUs, and {socket.gethostname()} shows none to this worker "
            f"(CUDA_VISIBLE_DEVICES {','.join(env().cuda_visible_devices or ()) or 'not set'}): see whether nvidia-smi "
            "lists it, and end the worker until it does."
        )
    if len(devices) > 1:
        _log.warning(
            "this process sees %d GPUs and uses the first: a worker has one GPU when it is started by "
            "`virnuc worker`, or with CUDA_VISIBLE_DEVICES",
            len(devices),
        )
    return devices[0]
