"""All missing shards of a run, computed by this program alone: for notebooks and scripts."""

import logging
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import torch

from virnuc_core.env_config import available_threads
from virnuc_core.errors import UsageError
from virnuc_core.inference.events import LaneEvent, LaneFinished, LaneReport, LaneStarted
from virnuc_core.inference.lane_journal import JournalEntry, LaneJournal, lane_report
from virnuc_core.inference.launcher import (
    CPU_LIBRARIES,
    LANE_PROCESS,
    deal_shards,
    end_lane_processes,
    run_lane,
)
from virnuc_core.inference.shard import pending_shards, remove_shard_temporaries
from virnuc_core.inference.worker import run_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import RunPlan

_CPU: Final = ("cpu",)
# As in the process of a lane, so that the numbers are the same to the last bit.
for _name, _value in CPU_LIBRARIES.items():
    os.environ.setdefault(_name, _value)

_log = logging.getLogger(__name__)


def require_main_process() -> None:
    """Refuses to make a run in the process of a lane, which imports the script that has started it.

    Raises:
        UsageError: this is such a process.
    """
    if multiprocessing.current_process().name.startswith(LANE_PROCESS):
        raise UsageError(
            "this script is imported by the process of each GPU, and starts over there: put what it does under "
            "`if __name__ == '__main__':`."
        )


def compute_missing(folder: RunFolder, plan: RunPlan, devices: Sequence[str]) -> list[LaneReport]:
    """Computes the shards that are not on the disk: on the CPU in this process, on GPUs in a process for each.

    Args:
        folder: the run's folder, which nobody else works in.
        plan: its plan.
        devices: "cpu" alone, or "cuda:0", "cuda:1", ...

    Raises:
        VirnucError: what stopped a lane; finished shards are kept.
    """
    pending = pending_shards(folder, plan)
    remove_shard_temporaries(folder, pending)
    hands = deal_shards(plan, pending, len(devices))
    if tuple(devices) == _CPU:
        return [_work_in_this_process(folder, hand) for hand in hands]

    def work(lane: int) -> LaneReport:
        with _journal(folder, lane) as journal:
            return run_lane(
                folder, hands[lane], devices[lane], lane=lane, num_lanes=len(hands), on_event=journal.write
            )

    with ThreadPoolExecutor(max(1, len(hands)), thread_name_prefix="lane") as threads:
        try:
            return list(threads.map(work, range(len(hands))))
        except (
            BaseException
        ):  # a lane has failed or this is interrupted, and the threads wait for their processes
            end_lane_processes()
            raise


def _work_in_this_process(folder: RunFolder, shards: tuple[int, ...]) -> LaneReport:
    """One lane on the CPU, without a process of its own."""
    started = time.perf_counter()
    entries: list[JournalEntry] = []
    with _journal(folder, 0) as journal, _threads_of_a_lane():

        def tell(event: LaneEvent) -> None:
            entries.append(JournalEntry(time=time.time(), event=event))
            journal.write(event)

        tell(LaneStarted(lane=0, device="cpu", host=socket.gethostname(), pid=os.getpid(), shards=shards))
        run_shards(folder, shards, "cpu", 0, tell)
        tell(LaneFinished(lane=0, seconds=time.perf_counter() - started))
    return lane_report(entries)


@contextmanager
def _journal(folder: RunFolder, lane: int) -> Iterator[LaneJournal]:
    path = folder.lane_journal(f"lane-{lane:04d}-{secrets.token_hex(4)}")
    with LaneJournal(path) as journal, journal.recording_failure(lane):
        yield journal


@contextmanager
def _threads_of_a_lane() -> Iterator[None]:
    """As many threads as a process for the lane would have."""
    before = torch.get_num_threads()
    torch.set_num_threads(available_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
