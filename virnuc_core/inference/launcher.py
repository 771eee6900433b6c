"""Local lanes, one process per device; torch must not be imported before a lane's process has selected its device."""

import ctypes
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Final

from virnuc_core.env_config import available_threads, env, physical_gpu
from virnuc_core.errors import DeviceLostError, LaneError, VirnucError
from virnuc_core.inference.events import (
    LaneEvent,
    LaneFinished,
    LaneReport,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
)
from virnuc_core.inference.lane_journal import JournalEntry, lane_report
from virnuc_core.inference.plan import RunPlan, read_plan
from virnuc_core.run_folder import RunFolder

if TYPE_CHECKING:  # imports torch
    from virnuc_core.inference.runner import LoadedModels

_LANE_PROCESS: Final = "virnuc-lane"  # prefix of process names
_FINISHED: Final = "finished"
_SECONDS_TO_END: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1  # of Linux
# Models may have to be loaded and compiled before the first shard, and estimates may be wrong.
_LEAST_TIMEOUT: Final = 1800.0
_TIMEOUT_PER_COST: Final = 20.0
_SIGNAL_HINTS: Final = {
    "SIGKILL": " (often: the machine ran out of memory)",
    "SIGBUS": " (often: a file of the run was cut short, or its disk failed, while it was read)",
}
_SIGNS_OF_LOST_DEVICE: Final = (
    "CUDA error",
    "CUDA driver error",
    "Triton Error [CUDA]",
    "CUDNN_STATUS",
    "CUBLAS_STATUS",
)
# Every kernel launch takes the GIL. With Python's default switch interval of 5 ms, the launching thread makes 1,300 to
# 2,400 small calls per second while another thread tokenizes; with this one, 30,000 or more.
_SWITCH_SECONDS: Final = 5e-5

_lost_device: Final = threading.Event()

_log = logging.getLogger(__name__)


def assign_shards(plan: RunPlan, indices: Sequence[int], num_lanes: int) -> tuple[tuple[int, ...], ...]:
    """Assigns shards to lanes for equal finish times: by falling cost, each to the least loaded lane.

    Returns the shards of each lane in row order; lanes without work are left out.
    """
    loads = [(0.0, lane) for lane in range(num_lanes)]
    assigned: list[list[int]] = [[] for _ in loads]
    for index in sorted(indices, key=lambda i: (-plan.shards[i].cost, i)):
        load, lane = heapq.heappop(loads)
        assigned[lane].append(index)
        heapq.heappush(loads, (load + plan.shards[index].cost, lane))
    return tuple(tuple(sorted(lane)) for lane in assigned if lane)


def run_lane(
    folder: RunFolder,
    indices: Sequence[int],
    device: str,
    *,
    lane: int = 0,
    num_lanes: int = 1,
    on_event: Callable[[LaneEvent], None] | None = None,
) -> LaneReport:
    """Computes shards in a child process and waits for it; lanes run concurrently when called from several threads.

    The `num_lanes` lanes of this machine share the CPU threads. Events are passed to `on_event` in this thread; log records
    of the child go to this process's loggers. `device` is "cpu" or "cuda:N", as seen by this process.

    Raises:
        LaneError: the process died before finishing.
        DeviceLostError: the process hangs, and was ended.
        VirnucError: raised by the lane, or wrapping an unexpected error.
        OSError: the lane could not read or write a file.
    """
    started = time.perf_counter()
    entries, emit = _recorder(on_event)
    environment = _child_environment(device, num_lanes)
    gpu = environment.get("CUDA_VISIBLE_DEVICES")
    machine_device, child_device = (device, device) if gpu is None else (f"cuda:{gpu}", "cuda:0")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    log_level = logging.getLogger("virnuc_core").getEffectiveLevel()
    process = context.Process(
        target=_lane_main,
        args=(folder, tuple(indices), child_device, lane, environment, log_level, sender),
        name=f"{_LANE_PROCESS}-{lane}",
        daemon=True,
    )
    timeout = lane_timeout(shard.cost for shard in read_plan(folder.plan).shards)
    process.start()
    sender.close()  # leaves the child's copy only, so that its exit gives EOF here
    is_done = False
    try:
        emit(_lane_started(lane, machine_device, process.pid or 0, indices))
        for event in _received(receiver, process, f"lane {lane} on {device}", len(indices), timeout):
            if isinstance(event, ModelsLoaded):
                # Counted from process start, and with the host-wide device name.
                event = replace(event, device=machine_device, seconds=time.perf_counter() - started)
            emit(event)
        is_done = True
        emit(LaneFinished(lane=lane, seconds=time.perf_counter() - started))
    finally:
        receiver.close()
        _end(process, seconds_to_finish=_SECONDS_TO_END if is_done else 0)
    return lane_report(entries)


def run_lane_here(
    folder: RunFolder,
    indices: Sequence[int],
    models: "LoadedModels",
    on_event: Callable[[LaneEvent], None],
    lane: int = 0,
) -> LaneReport:
    """Computes shards in this thread, with the settings of a lane's process; see `run_shards` for what it raises.

    Raises:
        DeviceLostError: the GPU failed. CUDA does not recover from that in this process, see `has_lost_device`; what was on
            the device stays there.
    """
    from virnuc_core.inference.worker import run_shards

    started = time.perf_counter()
    entries, emit = _recorder(on_event)
    device, on_gpu = models.device, models.device.startswith("cuda")
    if on_gpu:
        prepare_for_gpus()
        device = f"cuda:{physical_gpu(int(device.partition(':')[2]))}"
    try:
        with nullcontext() if on_gpu else _using_threads():
            emit(_lane_started(lane, device, os.getpid(), indices))
            run_shards(folder, indices, models, lane, emit)
            emit(LaneFinished(lane=lane, seconds=time.perf_counter() - started))
    except RuntimeError as error:
        if not isinstance(lost := _unexpected(error, lane), DeviceLostError):
            raise
        _lost_device.set()
        # Its traceback holds tensors on the device. Freeing them there, even when the process ends, would abort it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
        raise lost from error
    return lane_report(entries)


def has_lost_device() -> bool:
    """Whether a GPU failed in this process, which can compute on none from then on; its child processes can."""
    return _lost_device.is_set()


def prepare_for_gpus() -> None:
    """Has threads of this process switch often, and sets variables that torch and Triton read when they are first used.

    Also has Triton hash itself meanwhile.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    # Varying batch sizes would otherwise fragment GPU memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    _start_hashing_triton()


@cache
def _start_hashing_triton() -> None:
    """Has Triton hash its own files, for which its first launch would wait half a second; it remembers the hash."""
    threading.Thread(target=_hash_triton, name="hash-triton", daemon=True).start()


def _hash_triton() -> None:
    with suppress(ImportError):  # then there are no kernels, or Triton has another way of doing this
        from triton.runtime.cache import triton_key

        triton_key()


@contextmanager
def _using_threads() -> Iterator[None]:
    """Gives torch the thread count of a lane's process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(available_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def lane_timeout(costs: Iterable[float]) -> float:
    """Seconds without a finished shard after which a lane hangs, for shards of these estimated seconds."""
    slowest = max(costs, default=0.0)
    return env().lane_timeout or max(_LEAST_TIMEOUT, _TIMEOUT_PER_COST * slowest)


def end_lane_processes() -> None:
    """Terminates all lanes of this process; `run_lane` then raises LaneError."""
    for process in multiprocessing.active_children():
        if process.name.startswith(_LANE_PROCESS):
            process.terminate()


def _recorder(
    on_event: Callable[[LaneEvent], None] | None,
) -> tuple[list[JournalEntry], Callable[[LaneEvent], None]]:
    entries: list[JournalEntry] = []

    def emit(event: LaneEvent) -> None:
        entries.append(JournalEntry(time=time.time(), event=event))
        if on_event is not None:
            on_event(event)

    return entries, emit


def _lane_started(lane: int, device: str, pid: int, shards: Sequence[int]) -> LaneStarted:
    return LaneStarted(lane=lane, device=device, host=socket.gethostname(), pid=pid, shards=tuple(shards))


def _child_environment(device: str, num_lanes: int) -> dict[str, str]:
    threads = str(max(1, available_threads() // num_lanes))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    environment = dict.fromkeys(names, threads)
    if device != "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = physical_gpu(int(device.partition(":")[2]))
    return environment


def _received(
    receiver: Connection, process: SpawnProcess, name: str, total: int, timeout: float
) -> Iterator[LaneEvent]:
    """Yields the lane's events until it has finished; log records go to this process's loggers."""
    left = total
    deadline = time.monotonic() + timeout
    while True:
        try:
            if not receiver.poll(max(0.0, deadline - time.monotonic())):
                raise DeviceLostError(
                    f"{name} hangs: no shard was finished for {timeout:.0f} s (VIRNUC_LANE_TIMEOUT), with {left} of "
                    f"{total} to do, and its process is ended. See the kernel's log, and the storage of the run. Finished "
                    "shards are kept: run the same command again to go on."
                )
            message = receiver.recv()
        except (EOFError, OSError):  # OSError if it died mid-message
            process.join()
            raise LaneError(
                f"the process of {name} {_how_it_ended(process.exitcode)} with {left} of {total} shards to do. "
                "Finished shards are kept: run the same command again to go on."
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
            deadline = time.monotonic() + timeout
            yield message


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"was ended by {name}{_SIGNAL_HINTS.get(name, '')}"
    return f"ended with exit code {exitcode}"


def _end(process: SpawnProcess, seconds_to_finish: float) -> None:
    process.join(seconds_to_finish)
    if process.is_alive():
        process.terminate()
        process.join(_SECONDS_TO_END)
    if process.is_alive():
        process.kill()
        process.join(_SECONDS_TO_END)
    if process.is_alive():  # in a call of the kernel that cannot be interrupted
        _log.error("process %s cannot be ended: the system's log may say what it waits for", process.pid)
        return
    process.close()


def _lane_main(
    folder: RunFolder,
    indices: tuple[int, ...],
    device: str,
    lane: int,
    environment: dict[str, str],
    log_level: int,
    sender: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    _die_with_parent()
    os.environ.update(environment)
    if device != "cpu":
        prepare_for_gpus()
    pipe = _PipeHandler(sender)
    logging.getLogger().setLevel(log_level)
    logging.getLogger().addHandler(pipe)
    try:
        # Both import torch, so not before the lines above.
        from virnuc_core.inference.runner import LoadedModels
        from virnuc_core.inference.worker import run_shards

        run_shards(folder, indices, LoadedModels(device), lane, pipe.send)
    except (VirnucError, OSError, MemoryError) as error:
        pipe.send(error)
    except Exception as error:  # noqa: BLE001 - the end of a process: the parent reports what happened
        _log.debug("lane %d failed unexpectedly", lane, exc_info=True)
        pipe.send(_unexpected(error, lane))
    else:
        pipe.send(_FINISHED)


def _unexpected(error: Exception, lane: int) -> VirnucError:
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # By text: torch has a class for these since 2.8, but other libraries have none.
    if any(sign in text for sign in _SIGNS_OF_LOST_DEVICE):
        return DeviceLostError(
            f"the GPU of lane {lane} failed ({text}): see the kernel's log for Xid errors. Finished shards are kept: run "
            "the same command again to go on."
        )
    return VirnucError(
        f"lane {lane} failed unexpectedly: {text}. This is a fault of virnuc or of this installation: run again with "
        "--debug to see where, and report it. Finished shards are kept."
    )


def _die_with_parent() -> None:
    """Ends this process when its parent has ended; on Linux the kernel does, even if this process hangs."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    if sys.platform == "linux":
        # It counts the thread that started this process, which waits for it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=wait, daemon=True).start()


class _PipeHandler(QueueHandler):
    """Thread-safe sender of formatted log records and other messages to the parent."""

    def __init__(self, sender: Connection) -> None:
        super().__init__(queue.SimpleQueue())
        self._sender = sender
        self._turn = threading.Lock()

    def enqueue(self, record: logging.LogRecord) -> None:
        self.send(record)

    def send(self, message: object) -> None:
        with self._turn:
            self._sender.send(message)
