"""One planned model on one device: loaded, warmed up, and replaced by fp32 for sequences that overflow."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.errors import CheckpointError, DeviceError, DeviceMemoryError, MismatchError
from virnuc_core.inference.plan import PlannedModel
from virnuc_core.inference.prefetch import PreparedBatch, PreparedModel
from virnuc_core.inference.resident import ResidentModel, memory_for
from virnuc_core.inference.streams import HostStreams
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.compilation import compile_layers
from virnuc_core.models.loading import load_model
from virnuc_core.models.weights import Checkpoint, weights_fingerprint
from virnuc_core.specs import AttentionChoice

# Lengths of the sequences that a model is warmed up on, over and over.
_WARM_UP_TOKENS: Final = (30, 168, 512, 90)
_SMALL_BATCH_TOKENS: Final = 1024

_log = logging.getLogger(__name__)


class ModelRunner:
    """One model on one device, from prepared batches to mean vectors on the device.

    Attributes:
        planned: which model.
    """

    def __init__(
        self,
        planned: PlannedModel,
        streams: HostStreams,
        resident: ResidentModel,
        load_in_fp32: Callable[[], ResidentModel],
    ) -> None:
        self.planned: Final = planned
        self._streams = streams
        self._resident = resident
        self._load_in_fp32 = load_in_fp32

    @classmethod
    def load(cls, planned: PlannedModel, streams: HostStreams) -> Self:
        """Loads a model and checks that it is the planned one, and that its attention runs here.

        Raises:
            UsageError: the package that the attention needs is missing, or cannot be imported.
            DeviceError: the device cannot run the attention.
            CheckpointError: it cannot be read.
            MismatchError: its files have changed since the plan was made.
        """
        if planned.attention != "padded":  # which is plain torch
            head_dim = planned.spec.head_dim
            resolve_attention(planned.attention, streams.device, planned.family, planned.precision, head_dim)
        checkpoint = resolve_checkpoint(planned.location, planned.family)
        if (found := weights_fingerprint(checkpoint)) != planned.weights_fingerprint:
            raise MismatchError(
                f"the files of model {planned.name} ({planned.location}) have changed since the run was "
                f"planned: fingerprint {planned.weights_fingerprint[:12]}, now {found[:12]}. Put the old "
                "ones back, start over with --force, or move the run to the new ones with `virnuc reprocess`."
            )
        model, _ = load_model(checkpoint, streams.device, planned.precision)
        compile_layers(model, planned.compile_mode)
        resident = ResidentModel(planned, model, streams, planned.precision, planned.attention)
        return cls(planned, streams, resident, partial(_load_in_fp32, planned, checkpoint, streams))

    def warm_up(self) -> None:
        """Runs a full and a small batch, so that compilation and library start-up are done with.

        Raises:
            DeviceMemoryError: something else has taken the device's memory.
        """
        for num_tokens in (self.planned.token_budget, _SMALL_BATCH_TOKENS):
            batch = self._random_batch(num_tokens)
            vectors = torch.empty((len(batch), self.planned.spec.embedding_dim), device=self._streams.device)
            try:
                self._resident.embed(batch, vectors, "a sequence of random tokens {}".format)
            except DeviceMemoryError:  # of the host
                raise
            except DeviceError as error:
                raise DeviceMemoryError(
                    f"{self._streams.device} has no memory left for even a small batch of model {self.planned.name}: "
                    "end what else uses it, choose a smaller model, or a device with more memory."
                ) from error
            self._streams.download(vectors).wait()

    def launch(self, batch: PreparedBatch, work: PreparedModel, vectors: Tensor) -> int:
        """Launches a batch; see `ResidentModel.embed`."""
        return self._resident.embed(batch, vectors, work.frame_id)

    def recompute_in_fp32(self, work: PreparedModel, vectors: Tensor) -> int:
        """Computes the sequences of a shard again in fp32 whose vectors are not finite, and waits for them.

        Meanwhile the model in its own precision is on the host, and the one in fp32 is dropped afterwards: a device
        need not have room for both.

        Args:
            work: all batches of the shard, every one of them launched.
            vectors: fp32 (d + 1, D) on the device, one row a place.

        Returns:
            How many times the device ran out of memory.

        Raises:
            CheckpointError: they are not finite in fp32 either.
            DeviceError: a single sequence does not fit.
            DeviceMemoryError: the model does not fit in fp32.
        """
        places = _not_finite(vectors[:-1])
        if self.planned.precision == "fp32":
            raise self._broken(work, places, self._resident)
        _log.warning(
            "model %s: %d of %d sequences, the first of them %s, gave numbers that are not finite in %s; they are "
            "done again in fp32",
            self.planned.name,
            len(places),
            len(work.rows),
            work.frame_id(work.first_in_row_order(places)),
            self.planned.precision,
        )
        advice = "choose --precision bf16, which does not overflow"
        with memory_for(f"model {self.planned.name} in fp32", self._streams.device, advice):
            self._resident.move_to("cpu")
            self._streams.free_memory()
            failures = self._embed_in_fp32(work, places, vectors)
            self._streams.free_memory()
            self._resident.move_to(self._streams.device)
        return failures

    def _embed_in_fp32(self, work: PreparedModel, places: npt.NDArray[np.int64], vectors: Tensor) -> int:
        """Does the sequences at some places with a model that is gone when this returns."""
        in_fp32 = self._load_in_fp32()
        exact = torch.empty((len(places), vectors.shape[1]), device=vectors.device)
        failures = sum(
            in_fp32.embed(batch, exact, lambda number: work.frame_id(int(places[number])))
            for batch in work.select(places)
        )
        if len(numbers := _not_finite(exact)):
            raise self._broken(work, places[numbers], in_fp32)
        vectors[torch.from_numpy(places).to(vectors.device)] = exact
        return failures

    def _broken(
        self, work: PreparedModel, places: npt.NDArray[np.int64], in_fp32: ResidentModel
    ) -> CheckpointError:
        """What vectors mean that are not finite in fp32."""
        place = work.first_in_row_order(places)
        [batch] = work.select(np.array([place]))
        return CheckpointError(
            f"model {self.planned.name} gives vectors that are not finite in fp32, the first for {work.frame_id(place)}, "
            f"from {in_fp32.first_bad_layer(batch)} on: its weights are broken, fetch them again."
        )

    def _random_batch(self, num_tokens: int) -> PreparedBatch:
        """A batch of at most so many random tokens."""
        repeats = max(1, num_tokens // sum(_WARM_UP_TOKENS))
        lengths = np.tile(_WARM_UP_TOKENS, repeats) if num_tokens >= sum(_WARM_UP_TOKENS) else [num_tokens]
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        input_ids = self._streams.empty_on_host(int(cu_seqlens[-1]), torch.int32)
        vocab_size = self.planned.spec.vocab_size
        input_ids.numpy()[:] = np.random.default_rng(0).integers(vocab_size, size=len(input_ids))
        return PreparedBatch(input_ids, cu_seqlens, 0)


def _not_finite(vectors: Tensor) -> npt.NDArray[np.int64]:
    """Numbers of the rows that are not finite, ascending; waits for the device."""
    return torch.isfinite(vectors).all(dim=1).logical_not().nonzero().flatten().cpu().numpy()


def _load_in_fp32(planned: PlannedModel, checkpoint: Checkpoint, streams: HostStreams) -> ResidentModel:
    """The same model with nothing rounded, for batches that need it."""
    model, spec = load_model(checkpoint, streams.device, "fp32")
    choice: AttentionChoice = "reference" if planned.attention == "reference" else "auto"
    attention = resolve_attention(choice, streams.device, planned.family, "fp32", spec.head_dim)
    return ResidentModel(planned, model, streams, "fp32", attention)
