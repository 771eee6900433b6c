"""One planned model on one device: loaded, warmed up, and tried again in fp32 where its numbers overflow."""

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.inference.prefetch import PreparedBatch, PreparedModel
from virnuc_core.inference.resident import ResidentModel, memory_for
from virnuc_core.inference.streams import HostStreams
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.compilation import compile_layers
from virnuc_core.models.loading import load_model
from virnuc_core.models.weights import Checkpoint, weights_fingerprint
from virnuc_core.run_plan import PlannedModel
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
        """Loads a model and checks that it is the planned one.

        Raises:
            CheckpointError: it cannot be read.
            MismatchError: its files have changed since the plan was made.
        """
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
        """Runs a full and a small batch, so that compilation and library start-up are done with."""
        for num_tokens in (self.planned.token_budget, _SMALL_BATCH_TOKENS):
            batch = self._random_batch(num_tokens)
            vectors = torch.empty((len(batch), self.planned.spec.embedding_dim), device=self._streams.device)
            self._resident.embed(batch, vectors, "random sequence {}".format)
            self._streams.download(vectors).wait()

    def launch(self, batch: PreparedBatch, work: PreparedModel, vectors: Tensor) -> int:
        """Launches a batch; see `ResidentModel.embed`."""
        return self._resident.embed(batch, vectors, work.frame_id)

    def repair(self, batch: PreparedBatch, work: PreparedModel, vectors: Tensor) -> int:
        """Computes a batch again in fp32, whose vectors were not all finite, and waits for it.

        Returns:
            How many times the device ran out of memory.

        Raises:
            CheckpointError: they are not finite in fp32 either.
            DeviceMemoryError: a single sequence does not fit.
        """
        failures = 0
        if self.planned.precision != "fp32":
            _log.warning(
                "model %s: a batch of %d tokens gave numbers that are not finite in %s, %s is in it; it is "
                "done again in fp32",
                self.planned.name,
                batch.num_tokens,
                self.planned.precision,
                self._first_bad(batch, work, vectors),
            )
            failures = self._in_fp32.embed(batch, vectors, work.frame_id)
        if (bad := self._first_bad(batch, work, vectors)) is not None:
            in_fp32 = self._resident if self.planned.precision == "fp32" else self._in_fp32
            raise CheckpointError(
                f"model {self.planned.name} gives vectors that are not finite in fp32, the first for {bad}, from "
                f"{in_fp32.first_bad_layer(batch)} on: its weights are broken, fetch them again."
            )
        return failures

    @cached_property
    def _in_fp32(self) -> ResidentModel:
        return self._load_in_fp32()

    def _first_bad(self, batch: PreparedBatch, work: PreparedModel, vectors: Tensor) -> str | None:
        """Name of the first sequence of a batch, in row order, whose vector is not finite."""
        finite = torch.isfinite(vectors[batch.places]).all(dim=1).cpu().numpy()
        bad = batch.first + np.flatnonzero(~finite)
        return work.frame_id(int(bad[np.argmin(work.rows[bad])])) if len(bad) else None

    def _random_batch(self, num_tokens: int) -> PreparedBatch:
        """A batch of at most so many random tokens."""
        repeats = max(1, num_tokens // sum(_WARM_UP_TOKENS))
        lengths = np.tile(_WARM_UP_TOKENS, repeats) if num_tokens >= sum(_WARM_UP_TOKENS) else [num_tokens]
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        input_ids = self._streams.empty_on_host(int(cu_seqlens[-1]), torch.int32)
        vocab_size = self.planned.spec.vocab_size
        input_ids.numpy()[:] = np.random.default_rng(0).integers(vocab_size, size=len(input_ids))
        return PreparedBatch(input_ids, cu_seqlens, 0)


def _load_in_fp32(planned: PlannedModel, checkpoint: Checkpoint, streams: HostStreams) -> ResidentModel:
    """The same model with nothing rounded, for batches that need it."""
    with memory_for(f"model {planned.name} in fp32 as well", streams.device):
        model, spec = load_model(checkpoint, streams.device, "fp32")
    choice: AttentionChoice = "reference" if planned.attention == "reference" else "auto"
    attention = resolve_attention(choice, streams.device, planned.family, "fp32", spec.head_dim)
    return ResidentModel(planned, model, streams, "fp32", attention)
