"""Lanes: each owns one device and one process on it, and they run side by side."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from pathlib import Path

from prefect import flow

from tasks.embedding import compute_shards, end_lane_processes
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.launcher import deal_shards
from virnuc_core.run_plan import RunFolder, read_plan

_log = logging.getLogger(__name__)


@flow(name="embed-lane", flow_run_name="lane-{lane}-{device}", persist_result=False)
def embed_lane(folder: str, shards: tuple[int, ...], device: str, lane: int, num_lanes: int) -> LaneReport:
    """Computes some of a run's shards on one device.

    Args:
        folder: the run's folder, with its plan and frame store.
        shards: which of the plan's shards.
        device: "cpu" or "cuda:N".
        lane: number of this lane, from 0.
        num_lanes: lanes at work on this machine.

    Raises:
        VirnucError: what stopped the lane; its finished shards are kept.
    """
    return compute_shards(RunFolder(Path(folder)), shards, device, lane, num_lanes)


def run_lanes(folder: RunFolder, pending: Sequence[int], devices: Sequence[str]) -> list[LaneReport]:
    """Deals the pending shards to one lane a device and waits for all lanes, also when one of them fails.

    Raises:
        VirnucError: what stopped the first of the lanes that failed.
    """
    hands = deal_shards(read_plan(folder.plan), pending, len(devices))
    if not hands:
        return []
    with ThreadPoolExecutor(len(hands), thread_name_prefix="lane") as threads:
        lanes = [
            # A subflow finds its parent, and the lane its progress, in the context.
            threads.submit(
                copy_context().run,
                partial(embed_lane, str(folder.root), shards, device, lane=number, num_lanes=len(hands)),
            )
            for number, (shards, device) in enumerate(zip(hands, devices, strict=False))
        ]
        try:
            wait(lanes)
        except BaseException:  # this thread is being stopped, and the lanes' threads wait for their processes
            end_lane_processes()
            raise
    failed = [lane for lane in lanes if lane.exception() is not None]
    if failed:
        missing = [index for index in pending if not folder.shard(index).exists()]
        _log.error(
            "%d of %d lanes failed, and %d of %d shards are missing; those that are finished are kept: "
            "run the same command again to go on",
            len(failed),
            len(lanes),
            len(missing),
            len(pending),
        )
    return [lane.result() for lane in lanes]
