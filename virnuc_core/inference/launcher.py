"""One process per lane: started afresh, given one device and its share of the CPU, watched until it ends.

Nothing here imports torch, so the device is chosen before torch can look at the machine.
"""

import heapq
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Final

from virnuc_core.env_config import available_threads, physical_gpu
from virnuc_core.errors import DeviceLostError, LaneError, VirnucError
from virnuc_core.inference.compile_cache import compile_cache_environment, using_compile_cache
from virnuc_core.inference.events import (
    LaneEvent,
    LaneFinished,
    LaneReport,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
)
from virnuc_core.inference.lane_journal import JournalEntry, lane_report
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import RunPlan

# How libraries compute on the CPU; each reads it at its first product.
CPU_LIBRARIES: Final = {
    # Without it MKL rounds according to where in memory a thread finds its numbers, and so to the number of threads;
    # then a run that goes on with fewer cores would not give the same bytes.
    "MKL_CBWR": "AUTO",
    # oneDNN keeps what it has prepared for each shape, by default for the last 1,024: nearly a gigabyte for batches that
    # are all of different sizes. Layers of one batch share theirs.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # Torch keeps them once more, for fused products: 1.6 MB more with every shard.
    "LRU_CACHE_CAPACITY": "64",
}
# How the names of lanes' processes begin.
LANE_PROCESS: Final = "virnuc-lane"
_FINISHED: Final = "finished"
_SECONDS_TO_END: Final = 5.0
_SIGNAL_HINTS: Final = {
    "SIGKILL": " (often: the machine ran out of memory)",
    "SIGBUS": " (often: a file of the run was cut short, or its disk failed, while it was read)",
}
# The thread that launches work on the device asks for the interpreter at every kernel. With Python's own
# 5 ms it makes 1,300 to 2,400 small calls a second while the thread ahead makes objects of tokens; with this,
# 30,000 or more.
_SWITCH_SECONDS: Final = 5e-5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LaneOrder:
    """What a lane's process is told.

    Attributes:
        folder: the run's folder.
        indices: the shards to compute.
        lane: number of the lane.
        device: the device as the child sees it.
        environment: variables to set before torch is imported.
    """

    folder: RunFolder
    indices: tuple[int, ...]
    lane: int
    device: str
    environment: dict[str, str]


def deal_shards(plan: RunPlan, indices: Sequence[int], num_lanes: int) -> tuple[tuple[int, ...], ...]:
    """Deals shards to lanes so that the lanes end at about the same time.

    The costliest shard goes first, each to the lane with the least work. What a shard holds does not
    depend on this, only who computes it.

    Args:
        plan: the plan that the shards are of.
        indices: the shards to deal.
        num_lanes: most lanes to use.

    Returns:
        For each lane its shards in row order; lanes without work are left out.
    """
    loads = [(0.0, lane) for lane in range(num_lanes)]
    dealt: list[list[int]] = [[] for _ in loads]
    for index in sorted(indices, key=lambda i: (-plan.shards[i].cost, i)):
        load, lane = heapq.heappop(loads)
        dealt[lane].append(index)
        heapq.heappush(loads, (load + plan.shards[index].cost, lane))
    return tuple(tuple(sorted(lane)) for lane in dealt if lane)


def run_lane(
    folder: RunFolder,
    indices: Sequence[int],
    device: str,
    *,
    lane: int = 0,
    num_lanes: int = 1,
    on_event: Callable[[LaneEvent], None] | None = None,
) -> LaneReport:
    """Works through shards in a process of its own, and waits for it.

    Several lanes run at once when this is called from several threads. Log records of the process come out
    of this process's loggers.

    Args:
        folder: the run's folder, with its plan and frame store.
        indices: the shards to compute.
        device: "cpu" or "cuda:N", as this process sees it.
        lane: number of the lane.
        num_lanes: lanes that run at the same time on this machine; they share the CPU threads.
        on_event: called in this thread for every event of the lane.

    Raises:
        LaneError: the process ended before its work did.
        VirnucError: what the lane raised; anything unexpected becomes one that names it.
        OSError: what the lane met when it read or wrote files.
    """
    started = time.perf_counter()
    child_device, environment = _child_environment(device, num_lanes)
    order = _LaneOrder(folder, tuple(indices), lane, child_device, environment)
    process, receiver = _start(order)
    entries: list[JournalEntry] = []

    def tell(event: LaneEvent) -> None:
        entries.append(JournalEntry(time=time.time(), event=event))
        if on_event is not None:
            on_event(event)

    is_done = False
    try:
        host, pid, shown = socket.gethostname(), process.pid or 0, _as_on_the_machine(device)
        tell(LaneStarted(lane=lane, device=shown, host=host, pid=pid, shards=order.indices))
        for event in _events(receiver, process, order):
            if isinstance(event, ModelsLoaded):
                # From the start of the process, and with the device's name on the machine.
                event = replace(event, device=shown, seconds=time.perf_counter() - started)
            tell(event)
        is_done = True
        tell(LaneFinished(lane=lane, seconds=time.perf_counter() - started))
    finally:
        receiver.close()
        _end(process, patience=_SECONDS_TO_END if is_done else 0)
    return lane_report(entries)


def end_lane_processes() -> None:
    """Ends every lane of this process, so that whoever waits for one goes on with its LaneError."""
    for process in multiprocessing.active_children():
        if process.name.startswith(LANE_PROCESS):
            process.terminate()


def _start(order: _LaneOrder) -> tuple[SpawnProcess, Connection]:
    """Starts the process of a lane, and gives the end of the pipe that it reports through."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_lane_main,
        args=(order, logging.getLogger("virnuc_core").getEffectiveLevel(), sender),
        name=f"{LANE_PROCESS}-{order.lane}",
        daemon=True,
    )
    process.start()
    sender.close()  # the child's copy is the only one then, so its end is seen here
    return process, receiver


def _child_environment(device: str, num_lanes: int) -> tuple[str, dict[str, str]]:
    """The device as the child will see it, and the environment that makes it so."""
    threads = str(max(1, available_threads() // num_lanes))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    environment = dict.fromkeys(names, threads)
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return device, environment
    return "cuda:0", {**environment, "CUDA_VISIBLE_DEVICES": physical_gpu(int(index))}


def _as_on_the_machine(device: str) -> str:
    """The device by its number or UUID on this machine, whatever part of the machine this process sees."""
    kind, _, index = device.partition(":")
    return device if kind != "cuda" else f"cuda:{physical_gpu(int(index))}"


def _events(receiver: Connection, process: SpawnProcess, order: _LaneOrder) -> Iterator[LaneEvent]:
    """Yields the lane's events until it has finished; log records go to the loggers on the way."""
    left = len(order.indices)
    while True:
        try:
            message = receiver.recv()
        except (EOFError, OSError):  # the latter when it ended in the middle of a message
            process.join()
            raise LaneError(
                f"the process of lane {order.lane} on {order.device} {_how_it_ended(process.exitcode)} with "
                f"{left} of {len(order.indices)} shards to do. Finished shards are kept: run the same "
                "command again to go on."
            ) from None
        if isinstance(message, logging.LogRecord):
            logger = logging.getLogger(message.name)
            if logger.isEnabledFor(message.levelno):
                logger.handle(message)
        elif isinstance(message, BaseException):
            raise message
        elif message == _FINISHED:
            return
        else:
            left -= isinstance(message, ShardDone)
            yield message


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"was ended by {name}{_SIGNAL_HINTS.get(name, '')}"
    return f"ended with exit code {exitcode}"


def _end(process: SpawnProcess, patience: float) -> None:
    """Waits for a process that is ending, and ends one that is not."""
    process.join(patience)
    if process.is_alive():
        process.terminate()
        process.join(_SECONDS_TO_END)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _lane_main(order: _LaneOrder, log_level: int, sender: Connection) -> None:
    """The body of the lane's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(order.environment | compile_cache_environment())
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Batches of many sizes would otherwise leave the GPU's memory in pieces that fit none of them.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for name, value in CPU_LIBRARIES.items():
        os.environ.setdefault(name, value)
    send = _one_at_a_time(sender.send)
    logging.getLogger().setLevel(log_level)
    logging.getLogger().addHandler(_PipeHandler(send))
    try:
        from virnuc_core.inference.worker import run_shards  # imports torch, so not before the lines above

        with using_compile_cache():
            run_shards(order.folder, order.indices, order.device, order.lane, send)
    except (VirnucError, OSError, MemoryError) as error:
        send(error)
    except Exception as error:  # noqa: BLE001 - the end of a process: the parent tells what happened
        _log.debug("lane %d failed unexpectedly", order.lane, exc_info=True)
        send(_unexpected(error, order.lane))
    else:
        send(_FINISHED)


def _unexpected(error: Exception, lane: int) -> VirnucError:
    """What an error that nobody foresaw means for whoever waits for the lane."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Torch has a class of its own for these since 2.8, and other libraries under it have not.
    if "CUDA error" in text or "CUDNN_STATUS" in text or "CUBLAS_STATUS" in text:
        return DeviceLostError(
            f"the GPU of lane {lane} failed ({text}): see the kernel's log for Xid errors. Finished shards are kept: run "
            "the same command again to go on."
        )
    return VirnucError(
        f"lane {lane} failed unexpectedly: {text}. This is a fault of virnuc or of this installation: run again with "
        "--debug to see where, and report it. Finished shards are kept."
    )


def _one_at_a_time(send: Callable[[object], None]) -> Callable[[object], None]:
    """The same for several threads, whose messages would otherwise run into each other in the pipe."""
    turn = threading.Lock()

    def send_in_turn(message: object) -> None:
        with turn:
            send(message)

    return send_in_turn


def _die_with_parent() -> None:
    """Ends this process when its parent is gone, so that no lane computes for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _PipeHandler(QueueHandler):
    """Sends log records, with their text filled in, to the parent."""

    def __init__(self, send: Callable[[object], None]) -> None:
        super().__init__(queue.SimpleQueue())
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        """Sends one prepared record."""
        self._send(record)
