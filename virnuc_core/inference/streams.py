"""The door between host and device: what is copied when, and who waits for whom.

On a GPU three streams work side by side: one uploads batches, one runs the models, one downloads results.
The host only launches; it waits for a `Download`, never for the device as a whole. On the CPU the same calls
do nothing, so the engine is written once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from virnuc_core.models.memory import empty_pinned


class OnDevice(Protocol):
    """A tensor, or something made of tensors."""

    def record_stream(self, stream: torch.cuda.Stream, /) -> None:
        """Marks it as used on a stream that it was not made on."""


@dataclass(frozen=True, slots=True)
class Download:
    """Tensors on their way to the host.

    Attributes:
        tensors: on the host; not to be read before `wait` has returned.
        done: is reached when they are there; None when they are.
    """

    tensors: tuple[Tensor, ...]
    done: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, when they are there."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensors


class HostStreams:
    """The CPU: everything is where it should be, and happens at once.

    Attributes:
        device: where the models are.
        batches_ahead: most batches that are launched before the first of them has completed.
    """

    batches_ahead: int = 0

    def __init__(self, device: str) -> None:
        self.device: Final = torch.device(device)

    def empty_on_host(self, size: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised (size,) tensor to be uploaded from."""
        return torch.empty(size, dtype=dtype)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """A block in which non-blocking copies to the device overlap with the models."""
        yield

    def hand_over(self, *uploads: OnDevice) -> None:
        """Gives what was uploaded to the models; they wait for it, the host does not."""

    def download(self, *tensors: Tensor) -> Download:
        """Begins to copy the results of the models to the host."""
        return Download(tensors, None)

    def free_memory(self) -> None:
        """Gives back memory that is kept for later."""


class CudaStreams(HostStreams):
    """A GPU, with streams of its own for both directions beside the current one."""

    # Enough that the device never waits for the host, few enough that a bad batch is soon noticed.
    batches_ahead = 3

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._models: Final = torch.cuda.current_stream(self.device)
        self._uploads: Final = torch.cuda.Stream(self.device)
        self._downloads: Final = torch.cuda.Stream(self.device)

    def empty_on_host(self, size: int, dtype: torch.dtype) -> Tensor:
        """See `HostStreams.empty_on_host`; the memory is pinned."""
        return empty_pinned((size,), dtype)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """See `HostStreams.uploading`."""
        with torch.cuda.stream(self._uploads):
            yield

    def hand_over(self, *uploads: OnDevice) -> None:
        """See `HostStreams.hand_over`."""
        self._models.wait_stream(self._uploads)
        for upload in uploads:
            upload.record_stream(self._models)

    def download(self, *tensors: Tensor) -> Download:
        """See `HostStreams.download`; the host's copies are pinned."""
        self._downloads.wait_stream(self._models)
        with torch.cuda.stream(self._downloads):
            copies = []
            for tensor in tensors:
                tensor.record_stream(self._downloads)
                copies.append(empty_pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True))
            # A thread that waits for it sleeps, and leaves its core to the tokenizers.
            done = torch.cuda.Event(blocking=True)
            done.record(self._downloads)
        return Download(tuple(copies), done)

    def free_memory(self) -> None:
        """See `HostStreams.free_memory`."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


def open_streams(device: str) -> HostStreams:
    """The streams of "cpu" or "cuda:N"."""
    return HostStreams(device) if device == "cpu" else CudaStreams(device)
