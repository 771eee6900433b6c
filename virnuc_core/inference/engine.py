"""One device's work on shards: both models and the head, one pass, never waiting at a shard's end."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from virnuc_core.errors import CheckpointError
from virnuc_core.inference.events import StageSeconds
from virnuc_core.inference.model_runner import ModelRunner
from virnuc_core.inference.plan import PlannedModel, RunPlan, Shard
from virnuc_core.inference.prefetch import PreparedBatch, PreparedModel, PreparedShard
from virnuc_core.inference.resident import memory_for
from virnuc_core.inference.reuse import ReusedVectors
from virnuc_core.inference.scorer import Scorer, require_same_head
from virnuc_core.inference.shard import ModelCounters, ShardCounters, ShardResult
from virnuc_core.inference.streams import Download, HostStreams
from virnuc_core.models.tensor_files import is_finite
from virnuc_core.specs import EmbeddingsDtype, Family

_STORED_DTYPES: Final[dict[EmbeddingsDtype, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
}
_TOO_LARGE: Final = "the {} vectors of rows {{}} to {{}} are too large for float16: use --embeddings float32."
_NOT_FINITE: Final = {
    "dna": _TOO_LARGE.format("DNA"),
    "protein": _TOO_LARGE.format("protein"),
    "scores": "the head gives scores that are not finite for rows {} to {}: its weights are broken, fetch it again.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedShard:
    """A shard whose numbers are on their way to the host.

    Attributes:
        shard: which one.
        names: which field of the result each download is for.
        download: the numbers, rows in row order.
        counters: the work done.
        seconds: spent so far.
    """

    shard: Shard
    names: tuple[str, ...]
    download: Download
    counters: ShardCounters
    seconds: StageSeconds

    def result(self) -> ShardResult:
        """The numbers, when they have come.

        Raises:
            CheckpointError: not all of them are finite.
        """
        tensors = dict(zip(self.names, self.download.wait(), strict=True))
        for name, tensor in tensors.items():
            if not is_finite(tensor):
                raise CheckpointError(_NOT_FINITE[name].format(self.shard.begin, self.shard.end))
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        return ShardResult(
            dna=arrays.get("dna"),
            protein=arrays.get("protein"),
            scores=arrays.get("scores"),
            counters=self.counters,
        )


class _ModelPass:
    """One model's way through one shard.

    Attributes:
        vectors: fp32 (d + 1, D) on the device, one row a place, and zeros for the rows without a sequence.
        overflowed_batches: how many gave vectors that are not finite.
        counters: the work done so far.
    """

    def __init__(self, runner: ModelRunner, work: PreparedModel, streams: HostStreams) -> None:
        self.runner = runner
        self.work = work
        self._streams = streams
        width = runner.planned.spec.embedding_dim
        self.vectors = torch.empty((len(work.rows) + 1, width), device=streams.device)
        self.vectors[-1] = 0.0
        self.overflowed_batches = 0
        self._out_of_memory = 0

    def launch(self, batch: PreparedBatch) -> Download:
        """Launches a batch, and gives whether all its vectors are finite."""
        self._out_of_memory += self.runner.launch(batch, self.work, self.vectors)
        return self._streams.download(torch.isfinite(self.vectors[batch.places]).all())

    def finish(self) -> None:
        """Does what has overflowed again, when all batches are done."""
        if self.overflowed_batches:
            self._out_of_memory += self.runner.recompute_in_fp32(self.work, self.vectors)

    @property
    def family(self) -> Family:
        """Of the model."""
        return self.runner.planned.family

    @property
    def letters(self) -> int:
        """Residues or bases over all rows."""
        return self.work.letters

    def vectors_of_rows(self) -> Tensor:
        """fp32 (n, D) on the device, in row order; the host does not wait for them."""
        with self._streams.uploading():
            places = self.work.places.to(self._streams.device, non_blocking=True)
        self._streams.hand_over(places)
        return self.vectors.index_select(0, places)

    @property
    def counters(self) -> ModelCounters:
        """The work done so far."""
        return ModelCounters(
            name=self.runner.planned.name,
            family=self.family,
            sequences=len(self.work.rows),
            tokens=self.work.tokens,
            batches=len(self.work.batches),
            capacity=self.work.capacity,
            fp32_batches=self.overflowed_batches,
            out_of_memory=self._out_of_memory,
        )


class _KeptPass:
    """The same of a model whose vectors were computed in an earlier run: there is nothing to launch."""

    def __init__(self, kept: ReusedVectors, streams: HostStreams) -> None:
        self.family: Final[Family] = kept.counters.family
        self.letters: Final = kept.letters
        self.counters: Final = kept.counters
        self._kept = kept
        self._streams = streams

    def vectors_of_rows(self) -> Tensor:
        """fp32 (n, D) on the device, in row order."""
        with self._streams.uploading():
            vectors = self._kept.vectors.to(self._streams.device, non_blocking=True)
        self._streams.hand_over(vectors)
        return vectors


@dataclass(frozen=True, slots=True)
class _ShardPass:
    """All models' ways through one shard, from the time it began."""

    shard: Shard
    models: tuple[_ModelPass | _KeptPass, ...]
    prepare_seconds: float
    begun: float


@dataclass(frozen=True, slots=True)
class _Forward:
    """A batch on the device."""

    batch: PreparedBatch
    model: _ModelPass
    all_finite: Download


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch, if there is any, and the shard that is complete with it, if one is."""

    forward: _Forward | None
    completes: _ShardPass | None


class Embedder:
    """All models of a plan, resident on one device."""

    def __init__(
        self, plan: RunPlan, streams: HostStreams, runners: tuple[ModelRunner, ...], scorer: Scorer | None
    ) -> None:
        self._plan = plan
        self._streams = streams
        self._runners = {runner.planned.family: runner for runner in runners}
        self._scorer = scorer

    @classmethod
    def load(
        cls, plan: RunPlan, streams: HostStreams, reused_families: frozenset[Family] = frozenset()
    ) -> Self:
        """Puts the plan's models and head on the device of `streams`, and warms a GPU up.

        Args:
            plan: what to compute.
            streams: of the device.
            reused_families: models that are loaded only when a shard without kept vectors comes.

        Raises:
            CheckpointError: a model or the head cannot be read.
            MismatchError: one of them has changed since the plan was made.
            DeviceMemoryError: they do not fit the device.
        """
        device = streams.device
        needed = [model for model in plan.models if model.family not in reused_families]
        with memory_for("the models", device):
            runners = tuple(ModelRunner.load(model, streams) for model in needed)
            scorer = None
            if plan.head is not None:
                for head in plan.heads:
                    require_same_head(head)
                dna_head = Path(plan.dna_head.location) if plan.dna_head else None
                scorer = Scorer(Path(plan.head.location), device, dna_head)
            if device.type != "cpu":
                for runner in runners:
                    runner.warm_up()
        return cls(plan, streams, runners, scorer)

    def run(self, prepared_shards: Iterable[PreparedShard]) -> Generator[ComputedShard, None, None]:
        """Computes shards; what a shard is given depends on the plan and on its rows only.

        While the device is at one batch, the next ones are launched, also when they are of the next shard.

        Args:
            prepared_shards: the next one is asked for when all batches of the one before are launched.

        Yields:
            The shards in order.

        Raises:
            CheckpointError: a vector is not finite, in fp32 neither.
            DeviceError: a single sequence does not fit the device.
            DeviceMemoryError: the vectors of a shard do not fit, or the model in fp32 where that is needed.
        """
        launched: deque[_Launched] = deque()
        ended = 0.0
        for prepared in prepared_shards:
            for batch in self._launch(prepared):
                launched.append(batch)
                while len(launched) > self._streams.batches_ahead:
                    ended = yield from self._settle(launched.popleft(), ended)
        while launched:
            ended = yield from self._settle(launched.popleft(), ended)

    def _launch(self, prepared: PreparedShard) -> Iterator[_Launched]:
        """Launches the batches of a shard, one at a step."""
        begun = time.perf_counter()
        pairs = zip(self._plan.models, prepared.models, strict=True)
        with memory_for("the vectors of a shard", self._streams.device):
            passes = tuple(self._pass_of(planned, work) for planned, work in pairs)
        shard = _ShardPass(prepared.shard, passes, prepared.seconds, begun)
        models = [model for model in passes if isinstance(model, _ModelPass) and model.work.batches]
        for model in models:
            for batch in model.work.batches:
                is_last = model is models[-1] and batch is model.work.batches[-1]
                forward = _Forward(batch, model, model.launch(batch))
                yield _Launched(forward, shard if is_last else None)
        if not models:
            yield _Launched(None, shard)

    def _pass_of(self, planned: PlannedModel, work: PreparedModel | ReusedVectors) -> _ModelPass | _KeptPass:
        """A model's way through a shard; the model is loaded now if nobody thought that it would be needed."""
        if isinstance(work, ReusedVectors):
            return _KeptPass(work, self._streams)
        if planned.family not in self._runners:
            with memory_for("the models", self._streams.device):
                self._runners[planned.family] = ModelRunner.load(planned, self._streams)
        return _ModelPass(self._runners[planned.family], work, self._streams)

    def _settle(self, launched: _Launched, ended: float) -> Generator[ComputedShard, None, float]:
        """Waits for a batch, and yields its shard if that is complete.

        Args:
            launched: the batch that was launched first of those not yet settled.
            ended: when the shard before was complete.

        Returns:
            When the last complete shard was.
        """
        if (forward := launched.forward) is not None:
            [all_finite] = forward.all_finite.wait()
            forward.model.overflowed_batches += not all_finite
        if (shard := launched.completes) is None:
            return ended
        for model in shard.models:
            if isinstance(model, _ModelPass):
                model.finish()
        complete = time.perf_counter()
        with memory_for("the vectors of a shard", self._streams.device):
            computed = self._finish(shard, forward_seconds=complete - max(shard.begun, ended))
        yield computed
        return complete

    @torch.inference_mode()
    def _finish(self, shard: _ShardPass, forward_seconds: float) -> ComputedShard:
        """From the vectors of distinct sequences to those of all rows, their scores, and to the host."""
        begun = time.perf_counter()
        names: dict[Family, str] = {"dnabert_s": "dna", "esm2": "protein"}
        vectors = {names[model.family]: model.vectors_of_rows() for model in shard.models}
        results: dict[str, Tensor] = {}
        if (dtype := _STORED_DTYPES.get(self._plan.embeddings)) is not None:
            results |= {name: tensor.to(dtype) for name, tensor in vectors.items()}
        if self._scorer is not None:
            results["scores"] = self._scorer.launch(vectors["dna"], vectors["protein"])
        letters = {model.family: model.letters for model in shard.models}
        return ComputedShard(
            shard=shard.shard,
            names=tuple(results),
            download=self._streams.download(*results.values()),
            counters=ShardCounters(
                frames=shard.shard.end - shard.shard.begin,
                residues=letters.get("esm2", 0),
                bases=letters.get("dnabert_s", 0),
                models=tuple(model.counters for model in shard.models),
            ),
            seconds=StageSeconds(
                tokenize=shard.prepare_seconds, forward=forward_seconds, score=time.perf_counter() - begun
            ),
        )
