"""Preparation of shards on the host, in a background thread."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.batching.packing import distinct_rows, pack
from virnuc_core.batching.tokenizers import Esm2Tokenizer, TokenColumn, Tokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.inference.device import Streams
from virnuc_core.inference.plan import PlannedModel, RunPlan, Shard
from virnuc_core.inference.shard import ModelCounters, ShardCounters
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.sequences.frame_store import FrameStore


@dataclass(frozen=True, slots=True)
class HostBatch:
    """B sequences with T tokens in total on the host, ready for upload.

    Attributes:
        input_ids: int32 (T,), pinned for a GPU.
        cu_seqlens: int32 (B + 1,), starting at 0.
        offset: index of the first sequence's vector.
    """

    input_ids: Tensor
    cu_seqlens: npt.NDArray[np.int32]
    offset: int

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T, the total number of tokens."""
        return len(self.input_ids)

    @property
    def output_slice(self) -> slice:
        """Indices of the vectors of its sequences."""
        return slice(self.offset, self.offset + len(self))

    def split(self, max_tokens: int) -> Iterator["HostBatch"]:
        """Splits between sequences into parts of at most `max_tokens`, or of a single sequence."""
        begin = 0
        while begin < len(self):
            limit = int(self.cu_seqlens[begin]) + max_tokens
            end = max(begin + 1, int(np.searchsorted(self.cu_seqlens, limit, side="right")) - 1)
            bounds = self.cu_seqlens[begin : end + 1]
            input_ids = self.input_ids[int(bounds[0]) : int(bounds[-1])]
            yield HostBatch(input_ids, bounds - bounds[0], self.offset + begin)
            begin = end


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """The d distinct sequences of a shard for one model, in batch order, which is that of their vectors.

    Attributes:
        rows: int64 (d,), first row of the store with each sequence.
        vector_index: int64 (n,), on the host, vector of each row of the shard.
        counters: planned work.
    """

    batches: tuple[HostBatch, ...]
    store: FrameStore
    rows: npt.NDArray[np.int64]
    vector_index: Tensor
    counters: ModelCounters

    def frame_id(self, index: int) -> str:
        """Name of the sequence of a vector."""
        row = int(self.rows[index])
        [name] = self.store.frame_ids(row, row + 1)
        return name

    def select(self, indices: npt.NDArray[np.int64]) -> list[HostBatch]:
        """Batches of the sequences with these vector indices, int64 (n,), ascending; their new vectors are 0..n-1."""
        selected = []
        for batch in self.batches:
            begin, end = np.searchsorted(indices, (batch.offset, batch.offset + len(batch)))
            if begin < end:
                tokens = TokenColumn(batch.input_ids.numpy(), batch.cu_seqlens.astype(np.int64))
                chosen = tokens.take(indices[begin:end] - batch.offset)
                selected.append(HostBatch(torch.from_numpy(chosen.input_ids), chosen.cu_seqlens, int(begin)))
        return selected


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInputs:
    """A shard ready for the device: planned work, collation time, and the sequences for each model.

    Attributes:
        sizes: int64 (n, 2), pinned for a GPU, see `FrameStore.sizes`; None without a head.
    """

    shard: Shard
    models: tuple[ModelInputs, ...]
    sizes: Tensor | None
    counters: ShardCounters
    seconds: float


@dataclass(frozen=True, slots=True)
class Collator:
    """Reads and batches the sequences of shards for the device of `streams`; needs no model."""

    store: FrameStore
    models: tuple[tuple[PlannedModel, Tokenizer], ...]
    streams: Streams
    needs_sizes: bool = False

    @classmethod
    def load(cls, plan: RunPlan, store: FrameStore, streams: Streams) -> Self:
        """Loads the tokenizers of a plan's models.

        Raises:
            CheckpointError: one of them is missing or corrupt.
        """
        tokenizers: list[Tokenizer] = [
            Esm2Tokenizer()
            if model.family == "esm2"
            else open_checkpoint(model.location, model.family).tokenizer
            for model in plan.models
        ]
        models = tuple(zip(plan.models, tokenizers, strict=True))
        return cls(store, models, streams, needs_sizes=plan.head is not None)

    def collate(self, shard: Shard) -> ShardInputs:
        """Prepares a shard; the result depends only on the plan and the shard's rows."""
        begun = time.perf_counter()
        models: list[ModelInputs] = []
        letters = {}
        for planned, tokenizer in self.models:
            column = self.store.dna if planned.family == "dnabert_s" else self.store.protein
            assert column is not None  # or there would be no plan
            sequences = column.rows(shard.begin, shard.end)
            letters[planned.family] = int(sequences.offsets[-1] - sequences.offsets[0])
            models.append(self._batch(shard, planned, tokenizer, sequences))
        counters = ShardCounters(
            frames=shard.end - shard.begin,
            residues=letters.get("esm2", 0),
            bases=letters.get("dnabert_s", 0),
            models=tuple(model.counters for model in models),
        )
        sizes = None
        if self.needs_sizes:
            sizes = self.streams.empty_pinned(2 * counters.frames, torch.int64).view(-1, 2)
            sizes.numpy()[:] = self.store.sizes(np.arange(shard.begin, shard.end))
        seconds = time.perf_counter() - begun
        return ShardInputs(shard=shard, models=tuple(models), sizes=sizes, counters=counters, seconds=seconds)

    def _batch(
        self, shard: Shard, planned: PlannedModel, tokenizer: Tokenizer, sequences: ByteColumn
    ) -> ModelInputs:
        rows, equal_to = distinct_rows(sequences)
        distinct = sequences if len(rows) == len(sequences) else sequences.take(rows)
        tokens = tokenizer.encode(distinct)
        packing = pack(tokens.num_tokens, planned.token_budget)
        input_ids = self.streams.empty_pinned(len(tokens.input_ids), torch.int32)
        batches: list[HostBatch] = []
        token, offset = 0, 0
        for members in packing.batches:
            batch = tokens.take(members)
            own_ids = input_ids[token : token + len(batch.input_ids)]
            own_ids.numpy()[:] = batch.input_ids
            batches.append(HostBatch(own_ids, batch.cu_seqlens, offset))
            token += len(own_ids)
            offset += len(members)
        index_of_distinct = np.empty(len(rows), np.int64)
        index_of_distinct[packing.rows] = np.arange(len(rows))
        vector_index = self.streams.empty_pinned(len(sequences), torch.int64)
        vector_index.numpy()[:] = index_of_distinct[equal_to]
        return ModelInputs(
            batches=tuple(batches),
            store=self.store,
            rows=shard.begin + rows[packing.rows],
            vector_index=vector_index,
            counters=ModelCounters(
                name=planned.name,
                family=planned.family,
                sequences=len(rows),
                tokens=len(tokens.input_ids),
                batches=len(batches),
                capacity=packing.capacity,
            ),
        )
