"""GPU queries through nvidia-smi, which create no CUDA context in this process."""

import logging
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from virnuc_core.env_config import physical_gpu
from virnuc_core.inference.events import GpuSample

_log = logging.getLogger(__name__)


def query_gpus(fields: Sequence[str]) -> list[tuple[str, ...]]:
    """Values without units, a row per GPU, none without nvidia-smi; for `fields` see `nvidia-smi --help-query-gpu`."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20.0)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("nvidia-smi failed: %s", error)
        return []
    return [tuple(value.strip() for value in line.split(",")) for line in done.stdout.splitlines()]


@contextmanager
def sampling_gpu(
    device: str, lane: int, emit: Callable[[GpuSample], None], every: float = 10.0
) -> Iterator[None]:
    """Samples a lane's GPU every `every` seconds, in a thread; does nothing on the CPU or without readings from nvidia-smi."""
    if not device.startswith("cuda"):
        yield
        return
    gpu = physical_gpu(int(device.partition(":")[2]))  # nvidia-smi ignores CUDA_VISIBLE_DEVICES
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every):
            found = _sample(gpu, lane)
            if found is None:
                _log.info("nvidia-smi does not report on GPU %s: its use is not recorded", gpu)
                return
            emit(found)

    thread = threading.Thread(target=sample, name=f"gpu-samples-{lane}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _sample(gpu: str, lane: int) -> GpuSample | None:
    """None for a GPU that does not exist or has no readings, such as a MIG instance."""
    fields = ("index", "uuid", "utilization.gpu", "memory.used")
    for index, uuid, utilization, memory in query_gpus(fields):
        # A UUID may be abbreviated to a prefix.
        is_it = gpu == index if gpu.isdecimal() else uuid.startswith(gpu)
        if is_it and utilization.isdecimal() and memory.isdecimal():
            return GpuSample(lane=lane, utilization=int(utilization) / 100, memory_bytes=int(memory) << 20)
    return None
