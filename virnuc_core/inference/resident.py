"""One model on one device, and what it does when a batch does not fit the device's memory."""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.errors import DeviceError, DeviceMemoryError
from virnuc_core.inference.plan import PlannedModel
from virnuc_core.inference.prefetch import PreparedBatch
from virnuc_core.inference.streams import HostStreams
from virnuc_core.models.encoder import Encoder, validate_repr_layer
from virnuc_core.models.memory import is_host_out_of_memory, is_out_of_memory
from virnuc_core.specs import AttentionBackend, ResolvedPrecision

# GPU libraries multiply few rows in another way, and round them otherwise, than many: from 300 tokens on in 16 bit and
# from 1,100 on in fp32 a sequence gets the same bits whatever is in its batch. So smaller batches are filled up.
_LEAST_TOKENS: Final = 2048
_FILLER_TOKENS: Final = 64

_log = logging.getLogger(__name__)


@contextmanager
def memory_for(
    what: str,
    device: torch.device | str,
    advice: str = "use smaller shards (--shard-seconds) or a smaller model",
) -> Iterator[None]:
    """A block for which there is no second way when it runs out of memory.

    Args:
        what: is made in the block.
        device: where it is made.
        advice: what to do, besides taking a device with more memory.

    Raises:
        DeviceMemoryError: it did, on the device or on the host.
    """
    try:
        yield
    except RuntimeError as error:
        if is_host_out_of_memory(error):
            device = "this host"
        elif not is_out_of_memory(error, device):
            raise
        raise DeviceMemoryError(
            f"{device} has not enough memory for {what}: {advice}, or a device with more memory."
        ) from error


class ResidentModel:
    """A model in one precision, and how many tokens at once its device turns out to have memory for."""

    def __init__(
        self,
        planned: PlannedModel,
        model: Encoder,
        streams: HostStreams,
        precision: ResolvedPrecision,
        attention: AttentionBackend,
    ) -> None:
        self.precision: Final = precision
        self._planned = planned
        self._model = model
        self._streams = streams
        self._attention = attention
        self._most_tokens = sys.maxsize

    def embed(self, batch: PreparedBatch, vectors: Tensor, name_of: Callable[[int], str]) -> int:
        """Launches a batch, in parts when the device has no memory for it; waits for nothing.

        After running out of memory, no batch of more than half as many tokens is tried again, apart from a
        single sequence that is longer.

        Args:
            batch: what to embed.
            vectors: fp32 (d, D) on the device, one row a place; those of the batch are filled in.
            name_of: the name of the sequence at a place.

        Returns:
            How many times the device ran out of memory.

        Raises:
            DeviceError: a single sequence does not fit, now or ever.
            DeviceMemoryError: the host has no memory for the copies.
        """
        failures = 0
        parts = deque(batch.iter_parts(self._most_tokens))
        while parts:
            part = parts.popleft()
            if self._launch(part, vectors):
                continue
            failures += 1
            self._streams.free_memory()
            if len(part) == 1:
                raise DeviceError(
                    f"{self._streams.device} has not enough memory for model {self._planned.name} on "
                    f"{name_of(part.first)} alone ({part.num_tokens} tokens): use a device with more "
                    "memory, or leave this sequence out."
                )
            self._most_tokens = part.num_tokens // 2
            _log.warning(
                "%s ran out of memory in model %s on a batch of %d tokens: going on with at most %d at once",
                self._streams.device,
                self._planned.name,
                part.num_tokens,
                self._most_tokens,
            )
            left = (part, *parts)
            parts = deque(smaller for one in left for smaller in one.iter_parts(self._most_tokens))
        return failures

    def move_to(self, device: torch.device | str) -> None:
        """Moves the weights; batches that are launched by then are not disturbed."""
        self._model.to(device)

    @torch.inference_mode()
    def first_bad_layer(self, batch: PreparedBatch) -> str:
        """Where the numbers of a batch first stop being finite, in words; waits for the device."""
        input_ids = batch.input_ids.to(self._streams.device)
        layout = self._model.build_layout(batch.cu_seqlens, self._attention)
        last = validate_repr_layer(self._planned.spec, self._planned.repr_layer)
        for layer in range(last + 1):
            if not torch.isfinite(self._model(input_ids, layout, layer)).all():
                return f"layer {layer} of {last}" if layer else "the embedding of its tokens"
        return "the mean of its tokens"

    @torch.inference_mode()
    def _launch(self, batch: PreparedBatch, vectors: Tensor) -> bool:
        """Launches a batch as it is; False when there is no memory for it."""
        try:
            with self._streams.uploading():
                input_ids = batch.input_ids.to(self._streams.device, non_blocking=True)
                bounds = batch.cu_seqlens
                if self._streams.device.type != "cpu" and self._planned.engine == "packed":
                    input_ids, bounds = _filled_up(input_ids, bounds)
                layout = self._model.build_layout(bounds, self._attention)
            self._streams.hand_over(input_ids, layout)
            embedded = self._model.embed(input_ids, layout, self._planned.repr_layer)
            vectors[batch.places] = embedded[: len(batch)]
        except RuntimeError as error:
            if not is_out_of_memory(error, self._streams.device):
                raise
            return False
        return True


def _filled_up(input_ids: Tensor, cu_seqlens: npt.NDArray[np.int32]) -> tuple[Tensor, npt.NDArray[np.int32]]:
    """A batch with short sequences of the token 0 after its own, until it has `_LEAST_TOKENS` at least."""
    if len(input_ids) >= _LEAST_TOKENS:
        return input_ids, cu_seqlens
    missing = -(-(_LEAST_TOKENS - len(input_ids)) // _FILLER_TOKENS)
    fillers = np.arange(1, missing + 1, dtype=np.int32) * _FILLER_TOKENS
    filled = functional.pad(input_ids, (0, missing * _FILLER_TOKENS))
    return filled, np.concatenate((cu_seqlens, cu_seqlens[-1] + fillers))
