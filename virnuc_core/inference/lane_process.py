"""The process of a lane, which computes on one device and keeps its models; importing this does not import torch.

`LaneProcess` is the parent's side, `serve` the child's. They exchange requests, events, log records and errors.
"""

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from logging.handlers import QueueHandler
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final, Self

from virnuc_core.env_config import available_threads, child_environment, env, physical_gpu
from virnuc_core.errors import DeviceLostError, LaneError, VirnucError
from virnuc_core.inference.events import LaneEvent, LaneFinished, LaneStarted, ShardDone
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.inference.plan import RunPlan, read_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.with_parent import end_with_parent

if TYPE_CHECKING:  # imports torch
    from virnuc_core.inference.runner import LoadedModels

# Not by `multiprocessing`, which runs the user's script again in its children. The last arguments are the parent's path.
_COMMAND: Final = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from virnuc_core.inference.lane_process import serve; serve(int(sys.argv[1]), sys.argv[2])"
)

Observer = Callable[[LaneEvent], None]
"""Is told of every event of a lane, in one of several threads."""

_log = logging.getLogger(__name__)


class LaneProcess:
    """A process that computes on one device, and keeps its models until it is closed; a context manager.

    Args:
        device: "cpu" or "cuda:N", as seen by this process.
        num_lanes: lanes that share the CPU threads of this machine with this one, itself included.
    """

    def __init__(self, device: str, num_lanes: int = 1) -> None:
        self._device, own = device, "cuda:0" if device.startswith("cuda") else device
        self._connection, theirs = Pipe()
        # The kernel ends the process when the thread ends that has started it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="lane-starter")
        self._process = self._starter.submit(
            _start, theirs, own, child_environment() | _variables(device, num_lanes)
        ).result()
        theirs.close()  # leaves the child's copy only, so that its exit gives EOF here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def run(self, folder: RunFolder, shards: Sequence[int], lane: int, emit: Observer) -> None:
        """Has the process compute shards; its log records go to this process's loggers. After an error it must be closed.

        Raises:
            LaneError: the process died before finishing.
            DeviceLostError: the process hangs.
            VirnucError: raised by the lane, or wrapping an unexpected error.
            OSError: the lane could not read or write a file.
        """
        plan = read_plan(folder.plan)
        emit(lane_started(plan, shards, lane, self._device, self._process.pid))
        timeout = lane_timeout(shard.cost for shard in plan.shards)
        for event in self._compute(folder, tuple(shards), lane, timeout):
            emit(event)
        emit(LaneFinished(lane=lane))

    def kill(self) -> None:
        """Ends the process; `run` in another thread then raises LaneError."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, and frees what it held."""
        self.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:  # in a call of the kernel that cannot be interrupted
            _log.error("process %s cannot be killed: check the system log", self._process.pid)
        self._connection.close()
        self._starter.shutdown()

    def _compute(
        self, folder: RunFolder, shards: tuple[int, ...], lane: int, timeout: float
    ) -> Iterator[LaneEvent]:
        """Yields the lane's events until it has finished."""
        name, left = f"lane {lane} on {self._device}", len(shards)
        deadline = time.monotonic() + timeout
        level = logging.getLogger("virnuc_core").getEffectiveLevel()
        with suppress(ConnectionError):  # it has died, as is seen below
            self._connection.send((os.getcwd(), folder, shards, lane, level))
        while True:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    raise DeviceLostError(
                        f"{name} hung: no shard finished in {timeout:.0f} s (VIRNUC_LANE_TIMEOUT), {left} of {len(shards)} "
                        "left; its process was killed. Check the kernel log and the run's storage. "
                        "Finished shards are kept: run the same command again to resume."
                    )
                message = self._connection.recv()
            except (EOFError, OSError):  # OSError if it died mid-message
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)
                raise LaneError(
                    f"the process of {name} {_how_it_ended(self._process.returncode)} with {left} of {len(shards)} shards "
                    "left. Finished shards are kept: run the same command again to resume."
                ) from None
            if isinstance(message, logging.LogRecord):
                logger = logging.getLogger(message.name)
                if logger.isEnabledFor(message.levelno):
                    logger.handle(message)
            elif isinstance(message, BaseException):
                raise message
            elif message is None:
                return
            else:
                left -= isinstance(message, ShardDone)
                deadline = time.monotonic() + timeout
                yield message


# Processes that no `LocalLanes` has taken yet.
_started_early: Final[dict[str, LaneProcess]] = {}


def start_early(choice: tuple[str, ...]) -> None:
    """Starts the processes of GPUs before this process imports torch, for its next `LocalLanes`; `choice` is that of RunConfig."""
    visible = env().cuda_visible_devices
    count = len(query_gpus(("index",)) if visible is None else visible)
    indices = [index for index in range(count) if choice == ("auto",) or str(index) in choice]
    for device in (f"cuda:{index}" for index in indices):
        _started_early[device] = LaneProcess(device, len(indices))


def take_started(devices: Iterable[str]) -> dict[str, LaneProcess]:
    """The processes of `start_early` for these devices; ends the others."""
    taken = {device: _started_early.pop(device) for device in devices if device in _started_early}
    while _started_early:
        _started_early.popitem()[1].close()
    return taken


def _start(connection: Connection, device: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Starts `serve`; torch and its OpenMP read the environment when they are loaded."""
    fd = connection.fileno()
    paths = map(os.path.abspath, sys.path)
    command = [sys.executable, "-P", "-c", _COMMAND, str(fd), device, *paths]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[fd])


def _variables(device: str, num_lanes: int) -> dict[str, str]:
    threads = str(max(1, available_threads() // num_lanes))
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), threads)
    if device.startswith("cuda"):
        variables["CUDA_VISIBLE_DEVICES"] = physical_gpu(int(device.partition(":")[2]))
    return variables


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        hints = {
            signal.SIGKILL: " (likely out of memory)",
            signal.SIGBUS: " (likely a truncated file of the run, or a failing disk)",
        }
        ended_by = signal.Signals(-exitcode)
        return f"was ended by {ended_by.name}{hints.get(ended_by, '')}"
    return f"ended with exit code {exitcode}"


def lane_timeout(costs: Iterable[float]) -> float:
    """Seconds without a finished shard after which a lane hangs, for shards of these estimated seconds."""
    # Models may have to be loaded before the first shard, and estimates may be wrong.
    return env().lane_timeout or max(1800.0, 20.0 * max(costs, default=0.0))


def lane_started(plan: RunPlan, shards: Sequence[int], lane: int, device: str, pid: int) -> LaneStarted:
    """The first event of a lane that computes these shards, with the name of the device on this host."""
    if device.startswith("cuda"):
        device = f"cuda:{physical_gpu(int(device.partition(':')[2]))}"
    rows = sum(plan.shards[shard].end - plan.shards[shard].begin for shard in shards)
    host = socket.gethostname()
    return LaneStarted(lane=lane, device=device, host=host, pid=pid, shards=tuple(shards), rows=rows)


def lane_error(error: Exception, lane: int) -> VirnucError:
    """What an unexpected error of a lane means for its user."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # By text: torch has a class for these, but other libraries have none.
    signs = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUDNN_STATUS", "CUBLAS_STATUS")
    if any(sign in text for sign in signs):
        return DeviceLostError(
            f"the GPU of lane {lane} failed ({text}): check the kernel log for Xid errors. Finished shards are kept: run the "
            "same command again to resume."
        )
    return VirnucError(
        f"lane {lane} failed unexpectedly: {text}. This is a bug in virnuc or its installation: run again with --debug and "
        "report the traceback. Finished shards are kept."
    )


@cache
def prepare_for_gpus() -> None:
    """Has threads of this process switch often, and sets variables that torch and Triton read when they are first used.

    Also has Triton hash its own files in a thread, for which its first launch would wait half a second; it remembers the hash.
    """
    # Every kernel launch takes the GIL. With Python's default switch interval of 5 ms, the launching thread makes 1,300 to
    # 2,400 small calls per second while another thread tokenizes; with this one, 30,000 or more.
    sys.setswitchinterval(5e-5)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    # Varying batch sizes would otherwise fragment GPU memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    threading.Thread(target=_hash_triton, name="hash-triton", daemon=True).start()


def _hash_triton() -> None:
    with suppress(ImportError):  # then there are no kernels, or Triton has another way of doing this
        from triton.runtime.cache import triton_key

        triton_key()


def serve(fd: int, device: str) -> None:
    """The process of a lane: computes shards as it is asked to, until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    end_with_parent()
    if device.startswith("cuda"):
        prepare_for_gpus()
    connection = Connection(fd)
    pipe = _PipeHandler(connection)
    logging.getLogger().addHandler(pipe)
    requests = queue.SimpleQueue[tuple[str, RunFolder, tuple[int, ...], int, int]]()

    def receive() -> None:
        while True:
            try:
                requests.put(connection.recv())
            except (EOFError, OSError):
                os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    with suppress(Exception):  # which the first request meets again
        _import_slow(device)
    while True:
        folder_here, folder, shards, lane, level = requests.get()
        os.chdir(folder_here)
        logging.getLogger().setLevel(level)
        pipe.send(_answer(folder, shards, lane, device, pipe.send))


def _import_slow(device: str) -> None:
    """Imports what computing on a device needs, which takes seconds."""
    import torch

    import virnuc_core.inference.runner
    from virnuc_core.models.kernels import has_quack

    if has_quack(torch.device(device)):
        import virnuc_core.models.kernels.products  # noqa: F401


def _answer(
    folder: RunFolder, shards: tuple[int, ...], lane: int, device: str, emit: Observer
) -> Exception | None:
    """Computes shards; returns what the parent is to raise, None when all are finished."""
    try:
        from virnuc_core.inference.runner import run_shards  # imports torch

        run_shards(folder, shards, _models(device), lane, emit)
    except (VirnucError, OSError, MemoryError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - the end of a process: the parent reports what happened
        _log.debug("lane %d failed unexpectedly", lane, exc_info=True)
        return lane_error(error, lane)
    return None


@cache
def _models(device: str) -> "LoadedModels":
    from virnuc_core.inference.runner import LoadedModels

    return LoadedModels(device)


class _PipeHandler(QueueHandler):
    """Thread-safe sender of formatted log records and other messages to the parent."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(queue.SimpleQueue())
        self._connection = connection
        self._turn = threading.Lock()

    def enqueue(self, record: logging.LogRecord) -> None:
        self.send(record)

    def send(self, message: object) -> None:
        with self._turn:
            self._connection.send(message)
