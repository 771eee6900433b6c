"""What a lane's GPU is doing, asked from time to time while the lane works."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from virnuc_core.env_config import physical_gpu
from virnuc_core.inference.events import GpuSample
from virnuc_core.inference.nvidia_smi import query_gpus

_FIELDS: Final = ("index", "uuid", "utilization.gpu", "memory.used")
_MIB: Final = 2**20

_log = logging.getLogger(__name__)


@contextmanager
def sampling_gpu(
    device: str, lane: int, write: Callable[[GpuSample], None], every: float = 10.0
) -> Iterator[None]:
    """Samples the GPU of a lane during the block; does nothing on the CPU or where nvidia-smi does not tell.

    Args:
        device: "cpu" or "cuda:N", as this process sees it.
        lane: number of the lane.
        write: is given every sample, in a thread of its own.
        every: seconds between samples.
    """
    if device == "cpu":
        yield
        return
    # As nvidia-smi knows it, which does not mind CUDA_VISIBLE_DEVICES.
    gpu = physical_gpu(int(device.partition(":")[2]))
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every):
            found = _ask(gpu, lane)
            if found is None:
                _log.info("nvidia-smi does not tell what GPU %s does: it is not recorded", gpu)
                return
            write(found)

    thread = threading.Thread(target=sample, name=f"gpu-samples-{lane}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _ask(gpu: str, lane: int) -> GpuSample | None:
    """One sample; None when there is no such GPU, or it does not tell, as parts of a divided GPU do not."""
    for index, uuid, utilization, memory in query_gpus(_FIELDS, units=False):
        # A UUID may be given by its beginning.
        is_it = gpu == index if gpu.isdecimal() else uuid.startswith(gpu)
        if is_it and utilization.isdecimal() and memory.isdecimal():
            return GpuSample(lane=lane, utilization=int(utilization) / 100, memory_bytes=int(memory) * _MIB)
    return None
