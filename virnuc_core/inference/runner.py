"""Runs a plan's models and head on one device, from the frame store to committed shards."""

import copy
import logging
import platform
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from virnuc_core.batching.packing import warn_if_inefficient
from virnuc_core.errors import CheckpointError, DeviceError, DeviceMemoryError, MismatchError
from virnuc_core.files import file_digest, make_folder
from virnuc_core.inference.device import AsyncCopy, Streams, on_device
from virnuc_core.inference.events import LaneEvent, ModelsLoaded, RowsComputed, ShardDone, StageSeconds
from virnuc_core.inference.plan import PlannedHead, PlannedModel, RunPlan, Shard, read_plan
from virnuc_core.inference.prefetch import Collator, HostBatch, ModelInputs, ShardInputs
from virnuc_core.inference.shard import (
    VECTOR_DATASETS,
    ShardCounters,
    ShardResult,
    require_planned,
    shard_identity,
    sum_counters,
    write_shard,
)
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.checkpoint import Checkpoint, load_model
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.heads import Head, load_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.models.memory import is_out_of_memory, raise_on_oom
from virnuc_core.models.tensor_files import is_finite
from virnuc_core.prefetcher import Prefetcher
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import AttentionChoice, Family

# GPU libraries round differently for small matrices: a sequence gets the same bits in any batch of at least 300 tokens
# in 16 bit, or 1,100 in fp32. Smaller batches are filled up.
_MIN_TOKENS: Final = 2048
_FILLER_TOKENS: Final = 64

_log = logging.getLogger(__name__)


class Scorer:
    """A head, applied to rows in blocks of fixed shape."""

    def __init__(self, head: Head, device: torch.device | str) -> None:
        self._device = torch.device(device)
        # Zero-padded to a fixed number of rows: the rounding of a matrix product may depend on it, and scores should not.
        self._block_rows = 256 if self._device.type == "cpu" else 4096
        self._head = head.to(device)

    def score(
        self, *vectors: npt.NDArray[np.floating[Any]], sizes: npt.NDArray[np.int64] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Results for n rows by name, from their DNA (n, D_dna) and protein vectors (n, D_protein), or both joined.

        For the results and `sizes` (n, 2) see `Head.score_rows`.
        """
        on_device = [torch.from_numpy(part.astype(np.float32)).to(self._device) for part in vectors]
        sizes_there = None if sizes is None else torch.from_numpy(sizes.astype(np.int64)).to(self._device)
        found = self.launch(*on_device, sizes=sizes_there)
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def launch(self, *vectors: Tensor, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """As `score`, for fp32 tensors on the device, with the results there; does not synchronise."""
        parts = vectors if sizes is None else (*vectors, sizes)
        blocks = [
            self._score_block(rows[: len(vectors)], rows[len(vectors) :])
            for rows in zip(*(part.split(self._block_rows) for part in parts), strict=True)
        ]
        return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}

    def _score_block(self, vectors: tuple[Tensor, ...], sizes: tuple[Tensor, ...]) -> dict[str, Tensor]:
        count = len(vectors[0])
        padding = (0, 0, 0, self._block_rows - count)
        features = functional.pad(torch.cat(vectors, dim=1), padding)
        found = self._head.score_rows(features, *(functional.pad(part, padding, value=1) for part in sizes))
        return {name: results[:count] for name, results in found.items()}


def load_planned_head(planned: PlannedHead) -> Head:
    """Loads the head of a plan.

    Raises:
        CheckpointError: it cannot be read.
        MismatchError: it has changed since planning.
    """
    path = Path(planned.location)
    if not path.is_file():
        raise CheckpointError(f"head {planned.name} ({path}) no longer exists: restore it.")
    _require_unchanged(f"head {planned.name} ({path})", planned.fingerprint, file_digest(path))
    return load_head(path)


def _require_unchanged(what: str, planned: str, found: str) -> None:
    if found != planned:
        raise MismatchError(
            f"{what} has changed since the run was planned: fingerprint {planned[:12]}, now {found[:12]}. Restore the old one, "
            "or start over with --force."
        )


class ModelRunner:
    """One model on one device, from host batches to mean vectors on the device.

    Adapts the batch size to the available memory, and recomputes overflowed sequences with the fp32 model from `load_fp32`.
    """

    def __init__(
        self,
        planned: PlannedModel,
        model: Encoder,
        streams: Streams,
        load_fp32: "Callable[[], ModelRunner] | None" = None,
    ) -> None:
        self.planned = planned
        self._model = model
        self._streams = streams
        self._load_fp32 = load_fp32
        self._max_tokens = sys.maxsize

    @classmethod
    def load(cls, planned: PlannedModel, streams: Streams) -> Self:
        """Loads a model, and verifies its fingerprint and that its attention runs here."""
        head_dim = planned.spec.head_dim
        resolve_attention(planned.attention, streams.device, planned.family, planned.precision, head_dim)
        checkpoint = _open_planned(planned)
        model = load_model(checkpoint, streams.device, planned.precision, compiled=planned.compiled)
        load_fp32 = None if planned.precision == "fp32" else partial(_load_fp32, planned, streams)
        return cls(planned, model, streams, load_fp32)

    def serves(self, planned: PlannedModel) -> bool:
        """Whether it computes what is planned, with whatever token budget."""
        own = self.planned
        return replace(planned, name=own.name, token_budget=own.token_budget) == own

    def for_run(self, planned: PlannedModel) -> "ModelRunner":
        """The same model for one run, whose batches are not limited by what earlier runs ran into."""
        runner = copy.copy(self)
        runner.planned = planned
        return runner

    def warm_up(self) -> None:
        """Runs a full and a small batch, to trigger compilation and library initialisation."""
        for num_tokens in (self.planned.token_budget, 1024):
            batch = self._random_batch(num_tokens)
            vectors = torch.empty((len(batch), self.planned.spec.embedding_dim), device=self._streams.device)
            try:
                self.embed(batch, vectors, "a sequence of random tokens {}".format)
            except DeviceMemoryError:  # of the host
                raise
            except DeviceError as error:
                raise DeviceMemoryError(
                    f"{self._streams.device} has no memory left for even a small batch of model {self.planned.name}: "
                    "close other programs on it, or choose a smaller model or a device with more memory."
                ) from error
            self._streams.download(vectors).wait()

    def embed(self, batch: HostBatch, vectors: Tensor, name_of: Callable[[int], str]) -> int:
        """Launches a batch, split if the device runs out of memory; returns how often it did. Does not synchronise.

        After running out of memory, batches are limited to half as many tokens, except for a longer single sequence. Fills in
        the batch's part of `vectors`, fp32 (d, D) on the device.
        """
        failures = 0
        parts = deque(batch.split(self._max_tokens))
        while parts:
            part = parts.popleft()
            if self._launch(part, vectors):
                continue
            failures += 1
            self._streams.free_memory()
            if len(part) == 1:
                raise DeviceError(
                    f"{self._streams.device} has too little memory for model {self.planned.name} on "
                    f"{name_of(part.offset)} alone ({part.num_tokens} tokens): use a device with more "
                    "memory, or remove this sequence."
                )
            self._max_tokens = part.num_tokens // 2
            _log.warning(
                "%s ran out of memory in model %s on a batch of %d tokens: continuing with at most %d at once",
                self._streams.device,
                self.planned.name,
                part.num_tokens,
                self._max_tokens,
            )
            remaining = (part, *parts)
            parts = deque(smaller for one in remaining for smaller in one.split(self._max_tokens))
        return failures

    def recompute_fp32(self, inputs: ModelInputs, vectors: Tensor) -> int:
        """Recomputes sequences with non-finite vectors in fp32, synchronously; returns how often memory ran out.

        All batches must be launched; `vectors` is fp32 (d, D) on the device. The low-precision model
        moves to the host meanwhile, so that the device need not fit both.
        """
        overflowed = _not_finite(vectors)
        if self._load_fp32 is None:
            raise self._broken(inputs, overflowed)
        _log.warning(
            "model %s: %d of %d sequences, the first of them %s, gave non-finite values in %s; recomputing them in fp32",
            self.planned.name,
            len(overflowed),
            len(inputs.rows),
            inputs.frame_id(_first_in_row_order(inputs, overflowed)),
            self.planned.precision,
        )
        advice = "choose --precision bf16, which does not overflow"
        with raise_on_oom(f"model {self.planned.name} in fp32", self._streams.device, advice):
            self._model.to("cpu")
            self._streams.free_memory()
            failures = self._load_fp32()._replace_vectors(inputs, overflowed, vectors)  # and drops the model
            self._streams.free_memory()
            self._model.to(self._streams.device)
        return failures

    def _replace_vectors(self, inputs: ModelInputs, indices: npt.NDArray[np.int64], vectors: Tensor) -> int:
        exact = torch.empty((len(indices), vectors.shape[1]), device=vectors.device)
        failures = sum(
            self.embed(batch, exact, lambda number: inputs.frame_id(int(indices[number])))
            for batch in inputs.select(indices)
        )
        if len(numbers := _not_finite(exact)):
            raise self._broken(inputs, indices[numbers])
        vectors[torch.from_numpy(indices).to(vectors.device)] = exact
        return failures

    def _broken(self, inputs: ModelInputs, indices: npt.NDArray[np.int64]) -> CheckpointError:
        """The error for vectors that are not finite in fp32."""
        return CheckpointError(
            f"model {self.planned.name} produces non-finite embeddings in fp32, first for "
            f"{inputs.frame_id(_first_in_row_order(inputs, indices))}: its weights are corrupt; download them again."
        )

    @torch.inference_mode()
    def _launch(self, batch: HostBatch, vectors: Tensor) -> bool:
        """Launches a batch; False if out of memory."""
        try:
            with self._streams.uploading():
                input_ids = batch.input_ids.to(self._streams.device, non_blocking=True)
                cu_seqlens = batch.cu_seqlens
                if self._streams.device.type != "cpu" and self.planned.engine == "packed":
                    input_ids, cu_seqlens = _fill_up(input_ids, cu_seqlens)
                layout = self._model.build_layout(cu_seqlens, self.planned.attention)
            self._streams.wait_for_upload(input_ids, layout)
            embedded = self._model.embed(input_ids, layout, self.planned.repr_layer)
            vectors[batch.output_slice] = embedded[: len(batch)]
        except RuntimeError as error:
            if not is_out_of_memory(error, self._streams.device):
                raise
            return False
        return True

    def _random_batch(self, num_tokens: int) -> HostBatch:
        lengths = [512, 168, 90, 30]  # equally many of each, longest first like real batches
        repeats = num_tokens // sum(lengths)
        lengths = np.repeat(lengths, repeats).tolist() if repeats else [num_tokens]
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        input_ids = self._streams.empty_pinned(int(cu_seqlens[-1]), torch.int32)
        vocab_size = self.planned.spec.vocab_size
        input_ids.numpy()[:] = np.random.default_rng(0).integers(vocab_size, size=len(input_ids))
        return HostBatch(input_ids, cu_seqlens, 0)


def _open_planned(planned: PlannedModel) -> Checkpoint:
    checkpoint = open_checkpoint(planned.location, planned.family)
    what = f"model {planned.name} ({planned.location})"
    _require_unchanged(what, planned.weights_fingerprint, checkpoint.fingerprint)
    return checkpoint


def _load_fp32(planned: PlannedModel, streams: Streams) -> ModelRunner:
    model = load_model(_open_planned(planned), streams.device, "fp32")
    choice: AttentionChoice = "reference" if planned.attention == "reference" else "auto"
    attention = resolve_attention(choice, streams.device, planned.family, "fp32", model.spec.head_dim)
    return ModelRunner(
        replace(planned, precision="fp32", attention=attention, compiled=False), model, streams
    )


def _fill_up(input_ids: Tensor, cu_seqlens: npt.NDArray[np.int32]) -> tuple[Tensor, npt.NDArray[np.int32]]:
    """Appends filler sequences of token 0 up to at least `_MIN_TOKENS`."""
    if len(input_ids) >= _MIN_TOKENS:
        return input_ids, cu_seqlens
    missing = -(-(_MIN_TOKENS - len(input_ids)) // _FILLER_TOKENS)
    fillers = np.arange(1, missing + 1, dtype=np.int32) * _FILLER_TOKENS
    filled = functional.pad(input_ids, (0, missing * _FILLER_TOKENS))
    return filled, np.concatenate((cu_seqlens, cu_seqlens[-1] + fillers))


def _not_finite(vectors: Tensor) -> npt.NDArray[np.int64]:
    """Indices of non-finite vectors, ascending; synchronises."""
    return torch.isfinite(vectors).all(dim=1).logical_not().nonzero().flatten().cpu().numpy()


def _first_in_row_order(inputs: ModelInputs, indices: npt.NDArray[np.int64]) -> int:
    return int(indices[np.argmin(inputs.rows[indices])])


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedShard:
    """A shard whose results, the fields `names` with rows in row order, are being copied to the host."""

    shard: Shard
    names: tuple[str, ...]
    copy: AsyncCopy
    counters: ShardCounters
    seconds: StageSeconds

    def result(self) -> ShardResult:
        """Waits for the results.

        Raises:
            CheckpointError: some are not finite.
        """
        arrays: dict[str, Any] = dict.fromkeys(("dna", "protein", "scores", "codes"))
        for name, tensor in zip(self.names, self.copy.wait(), strict=True):
            if not is_finite(tensor):
                rows = f"rows {self.shard.begin} to {self.shard.end}"
                if name in ("scores", "codes"):
                    raise CheckpointError(
                        f"the head produces non-finite scores for {rows}: its weights are corrupt; download it again."
                    )
                kind = "DNA" if name == "dna" else "protein"
                raise CheckpointError(
                    f"the {kind} embeddings of {rows} are too large for float16: use --embeddings float32."
                )
            arrays[name] = tensor.numpy()
        return ShardResult(**arrays, counters=self.counters)


@dataclass(frozen=True, slots=True)
class _ShardInFlight:
    """A shard on the device, of `num_batches` over all models; `vectors` are fp32 (d, D) on the device."""

    inputs: ShardInputs
    begun: float
    num_batches: int
    vectors: dict[Family, Tensor] = field(default_factory=dict)
    retired: Counter[Family] = field(default_factory=Counter)
    overflowed_batches: Counter[Family] = field(default_factory=Counter)
    out_of_memory: Counter[Family] = field(default_factory=Counter)


class LoadedModels:
    """Models and head on one device, kept between runs, which use them one at a time.

    A plan with other weights or arithmetic, or another head, has its own loaded in their place.

    Attributes:
        scorer: the head, None until one is loaded.
        stopping: of the run under way; when set, it ends after its current batch with KeyboardInterrupt.
    """

    def __init__(self, device: str, models: Iterable[ModelRunner] = ()) -> None:
        self.device: Final = device
        self.stopping = threading.Event()
        self._models = {model.planned.family: model for model in models}
        self._head: PlannedHead | None = None
        self.scorer: Scorer | None = None

    @cached_property
    def streams(self) -> Streams:
        """Those of the device, where this creates torch's context."""
        return Streams(self.device)

    def load(self, plan: RunPlan) -> None:
        """Loads what is missing for a plan, and warms up a GPU."""
        for planned in plan.models:
            if planned.family in self._models and not self._models[planned.family].serves(planned):
                del self._models[planned.family]
                self.streams.free_memory()
        wanted = [model for model in plan.models if model.family not in self._models]
        with raise_on_oom("the models", self.streams.device):
            loaded = [ModelRunner.load(model, self.streams) for model in wanted]
            if plan.head is not None and plan.head != self._head:
                self.scorer = Scorer(load_planned_head(plan.head), self.streams.device)
                self._head = plan.head
            if self.streams.device.type != "cpu":
                for model in loaded:
                    model.warm_up()
        self._models |= {model.planned.family: model for model in loaded}

    def model(self, planned: PlannedModel) -> ModelRunner:
        """A loaded model, for one run."""
        return self._models[planned.family].for_run(planned)

    def close(self) -> None:
        """Drops the models, and returns their memory to the device."""
        self._models, self._head, self.scorer = {}, None, None
        if "streams" in vars(self):  # or nothing was ever there
            self.streams.free_memory()


class InferenceRunner:
    """Runs one plan on models that are loaded; `on_rows` is told after each batch how many rows are computed, estimated."""

    def __init__(
        self, plan: RunPlan, loaded: LoadedModels, on_rows: Callable[[int], None] = lambda rows: None
    ) -> None:
        self._plan = plan
        self._loaded = loaded
        self._streams = loaded.streams
        self._models = {planned.family: loaded.model(planned) for planned in plan.models}
        self._scorer = loaded.scorer if plan.head is not None else None
        self._last_complete = 0.0
        self._on_rows = on_rows
        self._complete_rows = 0

    def run(self, shards: Iterable[ShardInputs]) -> Generator[ComputedShard, None, None]:
        """Computes shards in order; the results of a shard depend only on the plan and its rows.

        The next shard is drawn once all batches of the previous one are launched, to keep several batches in flight.
        """
        in_flight: deque[tuple[_ShardInFlight, Family, AsyncCopy]] = deque()
        for inputs in shards:
            for launched in self._launch(inputs):
                in_flight.append(launched)
                if self._loaded.stopping.is_set():
                    raise KeyboardInterrupt
                while len(in_flight) > self._streams.max_in_flight:
                    yield from self._retire(*in_flight.popleft())
        while in_flight:
            yield from self._retire(*in_flight.popleft())

    def _launch(self, inputs: ShardInputs) -> Iterator[tuple[_ShardInFlight, Family, AsyncCopy]]:
        """Launches one batch per step, and yields whether all of its vectors are finite."""
        num_batches = sum(len(model.batches) for model in inputs.models)
        # A dummy step completes a shard without batches in its turn.
        shard = _ShardInFlight(inputs, time.perf_counter(), max(1, num_batches))
        for model in inputs.models:
            family = model.counters.family
            width = self._models[family].planned.spec.embedding_dim
            with raise_on_oom("the vectors of a shard", self._streams.device):
                shard.vectors[family] = torch.empty((len(model.rows), width), device=self._streams.device)
        for model in inputs.models:
            family = model.counters.family
            vectors = shard.vectors[family]
            for batch in model.batches:
                shard.out_of_memory[family] += self._models[family].embed(batch, vectors, model.frame_id)
                all_finite = torch.isfinite(vectors[batch.output_slice]).all()
                yield shard, family, self._streams.download(all_finite)
        if not num_batches:
            yield shard, self._plan.models[0].family, AsyncCopy((torch.tensor(True),), None)

    def _retire(
        self, shard: _ShardInFlight, family: Family, all_finite: AsyncCopy
    ) -> Iterator[ComputedShard]:
        """Waits for the oldest batch, and yields its shard once complete."""
        [is_finite_batch] = all_finite.wait()
        shard.overflowed_batches[family] += not is_finite_batch
        shard.retired[family] += 1
        num_rows = shard.inputs.shard.end - shard.inputs.shard.begin
        self._on_rows(self._complete_rows + num_rows * shard.retired.total() // shard.num_batches)
        if shard.retired.total() < shard.num_batches:
            return
        self._complete_rows += num_rows
        for model in shard.inputs.models:
            family = model.counters.family
            if shard.overflowed_batches[family]:
                failures = self._models[family].recompute_fp32(model, shard.vectors[family])
                shard.out_of_memory[family] += failures
        complete = time.perf_counter()
        forward_seconds = complete - max(shard.begun, self._last_complete)
        self._last_complete = complete
        with raise_on_oom("the vectors of a shard", self._streams.device):
            computed = self._score(shard, forward_seconds)
        yield computed

    @torch.inference_mode()
    def _score(self, shard: _ShardInFlight, forward_seconds: float) -> ComputedShard:
        """Expands distinct vectors to rows, scores them, and starts the copy to the host."""
        begun = time.perf_counter()
        vectors: dict[str, Tensor] = {}
        for model in shard.inputs.models:
            family = model.counters.family
            index = self._upload(model.vector_index)
            vectors[VECTOR_DATASETS[family]] = shard.vectors[family].index_select(0, index)
        results: dict[str, Tensor] = {}
        if self._plan.embeddings != "none":
            dtype = torch.float32 if self._plan.embeddings == "float32" else torch.float16
            results |= {name: tensor.to(dtype) for name, tensor in vectors.items()}
        if self._scorer is not None:
            on_host = shard.inputs.sizes
            sizes = None if on_host is None else self._upload(on_host)
            results |= self._scorer.launch(vectors["dna"], vectors["protein"], sizes=sizes)
        models = tuple(
            replace(
                counters,
                fp32_batches=counters.fp32_batches + shard.overflowed_batches[counters.family],
                out_of_memory=counters.out_of_memory + shard.out_of_memory[counters.family],
            )
            for counters in shard.inputs.counters.models
        )
        return ComputedShard(
            shard=shard.inputs.shard,
            names=tuple(results),
            copy=self._streams.download(*results.values()),
            counters=replace(shard.inputs.counters, models=models),
            seconds=StageSeconds(
                tokenize=shard.inputs.seconds, forward=forward_seconds, score=time.perf_counter() - begun
            ),
        )

    def _upload(self, on_host: Tensor) -> Tensor:
        with self._streams.uploading():
            uploaded = on_host.to(self._streams.device, non_blocking=True)
        self._streams.wait_for_upload(uploaded)
        return uploaded


def run_shards(
    folder: RunFolder,
    indices: Sequence[int],
    models: LoadedModels,
    lane: int,
    emit: Callable[[LaneEvent], None],
) -> None:
    """Loads the models that are not loaded yet, and commits one shard after another.

    Two threads run alongside: one collates the next shards, also while models load; the other writes finished shards and
    emits `ShardDone`. Both end before this returns. `RowsComputed` is emitted every few seconds.

    Raises:
        MismatchError: the run was started over meanwhile.
        HostError: the plan is of another release series.
        VirnucError: any failure in any of the threads; committed shards stay.
        OSError: a shard cannot be written.
    """
    plan = read_plan(folder.plan)
    plan.require_own_series()
    collator = Collator.load(plan, FrameStore.open(folder.frames), models.streams)
    make_folder(folder.shards)

    def commit(computed: ComputedShard) -> ShardCounters:
        result, shard = computed.result(), computed.shard
        begun = time.perf_counter()
        is_wanted = partial(require_planned, folder, plan, shard)
        write_shard(folder.shard(shard.index), result, shard_identity(plan, shard), is_wanted)
        seconds = replace(computed.seconds, write=time.perf_counter() - begun)
        rows = shard.end - shard.begin
        _log.debug("lane %d: shard %d of %d, %d rows", lane, shard.index + 1, len(plan.shards), rows)
        emit(ShardDone(lane=lane, shard=shard.index, rows=rows, counters=result.counters, seconds=seconds))
        return result.counters

    shards = [plan.shards[index] for index in indices]
    total_rows = sum(shard.end - shard.begin for shard in shards)
    next_event = time.monotonic()

    def on_rows(rows: int) -> None:
        nonlocal next_event
        if rows < total_rows and (now := time.monotonic()) >= next_event:
            next_event = now + 3.0
            emit(RowsComputed(lane=lane, rows=rows))

    with (
        on_device(models.device),
        # Shards held on the host at once: token ids are small, vectors take up to 1 GB per shard.
        Prefetcher(collator.collate, shards, depth=2) as inputs,
    ):
        models.load(plan)
        is_cpu = models.streams.device.type == "cpu"
        hardware = f"{platform.machine()} CPU" if is_cpu else torch.cuda.get_device_name(models.device)
        emit(ModelsLoaded(lane=lane, device_name=hardware))
        with (
            closing(InferenceRunner(plan, models, on_rows).run(inputs)) as computed,
            Prefetcher(commit, computed, depth=1) as committed,
        ):
            work = list(committed)
    for model in sum_counters(work).models:
        warn_if_inefficient(f"{model.name} ({model.family})", model.packing_efficiency, model.batches)
