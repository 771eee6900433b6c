"""What can be done for a shard before a device is needed, and doing it ahead of time in another thread."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.batching.packing import distinct_rows, pack
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import MismatchError
from virnuc_core.inference.plan import PlannedModel, RunPlan, Shard
from virnuc_core.inference.reuse import ReusedShards, ReusedVectors
from virnuc_core.inference.streams import HostStreams
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.weights import tokenizer_path
from virnuc_core.sequences.frame_store import FrameStore

T = TypeVar("T")
R = TypeVar("R")


class Tokenizer(Protocol):
    """What both tokenizers have in common."""

    def encode(self, sequences: ByteColumn, /) -> TokenColumn:
        """Token ids, special tokens included, of every row."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """B sequences of T tokens on the host, ready to be uploaded.

    Attributes:
        input_ids: int32 (T,), pinned where there is a GPU.
        cu_seqlens: int32 (B + 1,), starting at 0.
        first: place of the first of them among the model's sequences in the shard; the others follow.
    """

    input_ids: Tensor
    cu_seqlens: npt.NDArray[np.int32]
    first: int

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch, T."""
        return len(self.input_ids)

    @property
    def places(self) -> slice:
        """The places of its sequences."""
        return slice(self.first, self.first + len(self))

    def iter_parts(self, most_tokens: int) -> Iterator["PreparedBatch"]:
        """Cuts it between sequences; a part has at most `most_tokens`, or is a single sequence."""
        begin = 0
        while begin < len(self):
            limit = int(self.cu_seqlens[begin]) + most_tokens
            end = max(begin + 1, int(np.searchsorted(self.cu_seqlens, limit, side="right")) - 1)
            bounds = self.cu_seqlens[begin : end + 1]
            input_ids = self.input_ids[int(bounds[0]) : int(bounds[-1])]
            yield PreparedBatch(input_ids, bounds - bounds[0], self.first + begin)
            begin = end

    def select(self, members: npt.NDArray[np.int64], first: int) -> "PreparedBatch":
        """Some of its sequences, by their numbers in the batch, with places from `first` on."""
        bounds = self.cu_seqlens
        chosen = [self.input_ids[int(bounds[i]) : int(bounds[i + 1])] for i in members]
        lengths = np.diff(bounds)[members]
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return PreparedBatch(torch.cat(chosen), cu_seqlens, first)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """The sequences of a shard for one model: equal ones once, in the order of their batches.

    A row may have no sequence for a model: a chunk without an open frame has no protein.

    Attributes:
        batches: all of them together have each place once.
        store: where the sequences are from.
        rows: int64 (d,), row of the store of the sequence at each place, the first of equal ones.
        places: int64 (n,), on the host, place of the sequence of each row of the shard; d for a row without one.
        letters: residues or bases over all n rows.
        tokens: over all batches.
        capacity: tokens that the batches have room for.
    """

    batches: tuple[PreparedBatch, ...]
    store: FrameStore
    rows: npt.NDArray[np.int64]
    places: Tensor
    letters: int
    tokens: int
    capacity: int

    def frame_id(self, place: int) -> str:
        """The name of the sequence at a place."""
        row = int(self.rows[place])
        [name] = self.store.frame_ids(row, row + 1)
        return name

    def first_in_row_order(self, places: npt.NDArray[np.int64]) -> int:
        """The one of these places whose sequence comes first in the store."""
        return int(places[np.argmin(self.rows[places])])

    def select(self, places: npt.NDArray[np.int64]) -> tuple[PreparedBatch, ...]:
        """The sequences at these places alone, in batches cut as before.

        Args:
            places: int64 (n,), ascending.

        Returns:
            Batches whose places are 0..n-1, in this order.
        """
        selected = []
        for batch in self.batches:
            begin, end = np.searchsorted(places, (batch.first, batch.first + len(batch)))
            if begin < end:
                selected.append(batch.select(places[begin:end] - batch.first, int(begin)))
        return tuple(selected)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedShard:
    """A shard that only needs a device.

    Attributes:
        shard: which one.
        models: its sequences for each model, in the order of the plan's models; or the vectors, if they are kept.
        seconds: how long it took.
    """

    shard: Shard
    models: tuple[PreparedModel | ReusedVectors, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Preparer:
    """Reads the sequences of shards and makes batches of them; needs no model.

    Attributes:
        store: where the sequences are.
        models: the plan's models, each with its tokenizer.
        streams: of the device that the batches are for.
        kept: the shards of the run that this one is made from, if there is one.
    """

    store: FrameStore
    models: tuple[tuple[PlannedModel, Tokenizer], ...]
    streams: HostStreams
    kept: ReusedShards | None = None

    @classmethod
    def load(
        cls, plan: RunPlan, store: FrameStore, streams: HostStreams, kept: ReusedShards | None = None
    ) -> Self:
        """Reads the tokenizers of a plan's models.

        Raises:
            CheckpointError: one of them is missing or damaged.
        """
        return cls(store, tuple((model, _load_tokenizer(model)) for model in plan.models), streams, kept)

    def prepare(self, shard: Shard) -> PreparedShard:
        """Everything for a shard that can be done ahead; depends on the plan and the rows of the shard only.

        Raises:
            MismatchError: a model needs sequences that the store lacks.
        """
        begun = time.perf_counter()
        kept = self.kept.read(shard) if self.kept else {}
        prepared = tuple(
            kept.get(model.family) or _prepare_model(self.store, shard, model, tokenizer, self.streams)
            for model, tokenizer in self.models
        )
        return PreparedShard(shard=shard, models=prepared, seconds=time.perf_counter() - begun)


def _load_tokenizer(planned: PlannedModel) -> Tokenizer:
    if planned.family == "esm2":
        return Esm2Tokenizer()
    return DnabertTokenizer(tokenizer_path(resolve_checkpoint(planned.location, planned.family)))


def _prepare_model(
    store: FrameStore, shard: Shard, planned: PlannedModel, tokenizer: Tokenizer, streams: HostStreams
) -> PreparedModel:
    column = store.dna if planned.family == "dnabert_s" else store.protein
    if column is None:
        raise MismatchError(f"model {planned.name} needs sequences of a kind that {store.folder} lacks.")
    sequences = column.rows(shard.begin, shard.end)
    first_rows, equal_to = distinct_rows(sequences)
    is_given = sequences.lengths[first_rows] > 0
    rows = first_rows[is_given]
    distinct = sequences if len(rows) == len(sequences) else sequences.take(rows)
    tokens = tokenizer.encode(distinct)
    packing = pack(tokens.num_tokens, planned.token_budget, padded=planned.attention == "padded")
    input_ids = streams.empty_on_host(packing.num_tokens, torch.int32)
    batches = []
    token, place = 0, 0
    for members in packing.batches:
        batch = tokens.take(members)
        part = input_ids[token : token + len(batch.input_ids)]
        part.numpy()[:] = batch.input_ids
        batches.append(PreparedBatch(part, batch.cu_seqlens, place))
        token += len(part)
        place += len(members)
    place_of = np.full(len(first_rows), len(rows))
    place_of[np.flatnonzero(is_given)[packing.rows]] = np.arange(len(rows))
    places = streams.empty_on_host(len(sequences), torch.int64)
    places.numpy()[:] = place_of[equal_to]
    return PreparedModel(
        batches=tuple(batches),
        store=store,
        rows=shard.begin + rows[packing.rows],
        places=places,
        letters=int(sequences.offsets[-1] - sequences.offsets[0]),
        tokens=packing.num_tokens,
        capacity=packing.capacity,
    )


class Ahead(Generic[T, R]):
    """Applies a function to items, one after another, in a thread of its own; gives the results in order.

    A context manager: the first items are begun when it is entered, and the thread has ended when it is left.
    Items are drawn in the calling thread. What the function raises is raised here in its place. When
    drawing fails, what was drawn before is still done; when the caller stops, only what has been begun is.
    """

    def __init__(self, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> None:
        """Begins nothing yet.

        Args:
            function: called in the other thread.
            items: its arguments.
            ahead: how many items are in the other thread when its oldest result is waited for, besides that one.
        """
        self._function = function
        self._items = iter(items)
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=getattr(function, "__name__", "ahead"))
        self._waiting: deque[Future[R]] = deque()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        self._begin()
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft().result()

    def _begin(self) -> None:
        """Hands items over until enough are in the other thread."""
        try:
            while len(self._waiting) <= self._ahead:
                self._waiting.append(self._thread.submit(self._function, next(self._items)))
        except StopIteration:
            return
        except BaseException:
            self._thread.shutdown()
            raise
