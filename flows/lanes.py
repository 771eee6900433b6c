"""The flows that the workers of a pool run for a run on another host: its plan, and lanes of its shards."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Running

from tasks.artifacts import LOGGERS, begin_flow
from tasks.preflight import find_fault
from tasks.progress import FlowProgress, LaneRows
from virnuc_core.device_record import recording_device
from virnuc_core.env_config import env
from virnuc_core.errors import DeviceLostError
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneEvent, RowsComputed
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.plan import Kind
from virnuc_core.inference.planning import open_plan
from virnuc_core.retries import retrying
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig

HELD: Final = "Held"
"""Name of the state of a run whose host or device is not fit; others compute what it was to compute."""
_SECONDS_BETWEEN_CHECKS: Final = 60.0

_log = logging.getLogger(__name__)


def journal_name(kind: str, run_id: str | UUID) -> str:
    """Journal of a lane's or a planning run: "lane-0003" or "plan", and the end of the run's id."""
    return f"{kind}-{str(run_id)[-8:]}"


def lane_kind(lane: int) -> str:
    """Such as "lane-0003"."""
    return f"lane-{lane:04d}"


@flow(name="embed-lane", persist_result=False)
def embed_lane(folder: str, shards: tuple[int, ...], lane: int, device: str, token: str) -> State[Any] | None:
    """Computes some of a run's shards on one device, and keeps a journal and a log of it in the run's folder.

    Args:
        folder: the run's folder, with its plan and frame store.
        shards: which of the plan's shards; those that are there already are left out.
        lane: number of this lane, from 0.
        device: "cpu" or "cuda:N"; "cuda" is the GPU that this process sees.
        token: that of the run: this host must see the same folder.
    """
    begin_flow()
    run = RunFolder(Path(folder))
    if held := hold_while_unfit(partial(run.require_token, token), device):
        return held
    name = journal_name(lane_kind(lane), flow_run.id)
    rows = LaneRows(FlowProgress())
    with (
        recording_device(env().device_record),
        _journal(run, name, lane) as journal,
        _log_file(run.lane_log(name)),
    ):

        def observe(event: LaneEvent) -> None:
            if not isinstance(event, RowsComputed):  # each line is synced to a shared disk
                journal.write(event)
            rows(event)

        own = own_device(device)
        LocalLanes((own,), observe, in_processes=True).compute_lane(run, shards, lane, own)
    return None


@flow(name="plan-run", persist_result=False)
def plan_run(folder: str, config: RunConfig, kind: Kind, device: str, token: str) -> State[Any] | None:
    """Plans a run on the hardware that will compute it.

    Args:
        folder: the run's folder, with its frame store.
        config: settings as asked for.
        kind: what the run is to give.
        device: as for `embed_lane`.
        token: as for `embed_lane`.
    """
    begin_flow()
    run = RunFolder(Path(folder))
    if held := hold_while_unfit(partial(run.require_token, token), device):
        return held
    with _journal(run, journal_name("plan", flow_run.id), lane=0):
        if others := [name for name in env().switches if name not in (config.switches or ())]:
            _log.warning(
                "%s is set for this worker but has no effect: set it where the run is started",
                ", ".join(others),
            )
        devices = (own_device(device),)
        store = FrameStore.open(run.frames)
        retrying("plan", partial(open_plan, config, store, kind, devices, run, token))
    return None


def hold_while_unfit(require_folder: Callable[[], None], device: str) -> State[Any] | None:
    """Keeps the worker's slot while this host or its device is not fit for a run that is not over.

    Returns the final state of a flow run that was held, since others have computed for it meanwhile, or whose parent has
    ended while no process watched over it; None for a fit host.
    """
    if _is_parent_over():
        return Cancelled(message="The run that it belongs to has ended.")
    if not (fault := find_fault(require_folder, device)):
        return None
    shown = ""
    while fault and not _is_parent_over():
        if fault != shown:
            _log.warning("%s accepts no work: %s", socket.gethostname(), fault)
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(flow_run.id), Running(name=HELD, message=fault))
            shown = fault
        time.sleep(_SECONDS_BETWEEN_CHECKS)
        fault = find_fault(require_folder, device)
    return Completed(name=HELD, message=f"Its work was done elsewhere: {shown}")


def _is_parent_over() -> bool:
    """Whether the run that this one is for, if any, has ended."""
    if (parent := flow_run.parent_flow_run_id) is None:
        return False
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(parent)).state
    return state is not None and state.is_final()


@contextmanager
def _journal(run: RunFolder, name: str, lane: int) -> Iterator[LaneJournal]:
    """The journal of a flow run, which also says how the block failed."""
    with LaneJournal(run.lane_journal(name)) as journal, journal.recording_failure(lane):
        yield journal


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Also writes log lines to a file, kept when Prefect's server has forgotten the run or was away: its newest 1 or 2 MB."""
    handler = RotatingFileHandler(path, maxBytes=1_000_000, backupCount=1, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    # The last one has the errors of tasks, with their tracebacks.
    loggers = [logging.getLogger(name) for name in (*LOGGERS, "prefect.task_runs")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def own_device(choice: str) -> str:
    """The device of a lane or a plan; DeviceLostError if that is a GPU and this process sees none."""
    if choice != "cuda":
        return choice
    devices = resolve_devices(("auto",))
    if devices == ("cpu",):
        raise DeviceLostError(
            f"this run is planned for GPUs, but this worker sees none on {socket.gethostname()} "
            f"(CUDA_VISIBLE_DEVICES {','.join(env().cuda_visible_devices or ()) or 'not set'}): check nvidia-smi, "
            "and stop the worker until it lists the GPU."
        )
    if len(devices) > 1:
        _log.warning(
            "this process sees %d GPUs but uses only the first: start its worker with `virnuc server worker` or set "
            "CUDA_VISIBLE_DEVICES",
            len(devices),
        )
    return devices[0]
