"""One device's work on shards: both models and the head, one pass, never waiting at a shard's end."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from virnuc_core.errors import MismatchError
from virnuc_core.inference.events import StageSeconds
from virnuc_core.inference.model_runner import ModelRunner
from virnuc_core.inference.prefetch import PreparedBatch, PreparedModel, PreparedShard
from virnuc_core.inference.resident import memory_for
from virnuc_core.inference.scorer import Scorer
from virnuc_core.inference.streams import Download, HostStreams
from virnuc_core.models.classifier import classifier_fingerprint
from virnuc_core.run_plan import PlannedHead, RunPlan, Shard
from virnuc_core.shard_file import ModelCounters, ShardCounters, ShardResult
from virnuc_core.specs import EmbeddingsDtype

_STORED_DTYPES: Final[dict[EmbeddingsDtype, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
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
        """The numbers, when they have come."""
        arrays = {name: tensor.numpy() for name, tensor in zip(self.names, self.download.wait(), strict=True)}
        return ShardResult(
            dna=arrays.get("dna"),
            protein=arrays.get("protein"),
            scores=arrays.get("scores"),
            counters=self.counters,
        )


class _ModelPass:
    """One model's way through one shard.

    Attributes:
        vectors: fp32 (d, D) on the device, one row a place.
        counters: the work done so far.
    """

    def __init__(self, runner: ModelRunner, work: PreparedModel, streams: HostStreams) -> None:
        self.runner = runner
        self.work = work
        self._streams = streams
        self.vectors = torch.empty((len(work.rows), runner.planned.spec.embedding_dim), device=streams.device)
        self._fp32_batches = 0
        self._out_of_memory = 0

    def launch(self, batch: PreparedBatch) -> Download:
        """Launches a batch, and gives whether all its vectors are finite."""
        self._out_of_memory += self.runner.launch(batch, self.work, self.vectors)
        return self._streams.download(torch.isfinite(self.vectors[batch.places]).all())

    def repair(self, batch: PreparedBatch) -> None:
        """Does a batch again whose vectors are not all finite."""
        self._out_of_memory += self.runner.repair(batch, self.work, self.vectors)
        self._fp32_batches += 1

    @property
    def counters(self) -> ModelCounters:
        """The work done so far."""
        return ModelCounters(
            name=self.runner.planned.name,
            family=self.runner.planned.family,
            sequences=len(self.work.rows),
            tokens=self.work.tokens,
            batches=len(self.work.batches),
            capacity=self.work.capacity,
            fp32_batches=self._fp32_batches,
            out_of_memory=self._out_of_memory,
        )


@dataclass(frozen=True, slots=True)
class _ShardPass:
    """All models' ways through one shard, from the time it began."""

    prepared: PreparedShard
    models: tuple[_ModelPass, ...]
    begun: float


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch on the device; `completes` is the shard that it is the last batch of."""

    batch: PreparedBatch
    model: _ModelPass
    all_finite: Download
    completes: _ShardPass | None


class Embedder:
    """All models of a plan, resident on one device."""

    def __init__(
        self, plan: RunPlan, streams: HostStreams, runners: tuple[ModelRunner, ...], scorer: Scorer | None
    ) -> None:
        self._plan = plan
        self._streams = streams
        self._runners = runners
        self._scorer = scorer

    @classmethod
    def load(cls, plan: RunPlan, streams: HostStreams) -> Self:
        """Puts the plan's models and head on the device of `streams`, and warms a GPU up.

        Raises:
            CheckpointError: a model or the head cannot be read.
            MismatchError: one of them has changed since the plan was made.
            DeviceMemoryError: they do not fit the device.
        """
        device = streams.device
        with memory_for("the models", device):
            runners = tuple(ModelRunner.load(model, streams) for model in plan.models)
            scorer = None
            if plan.head is not None:
                _require_same_head(plan.head)
                scorer = Scorer(Path(plan.head.location), device)
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
            DeviceMemoryError: a single sequence does not fit the device, or not all vectors of a shard do.
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
        pairs = zip(self._runners, prepared.models, strict=True)
        with memory_for("the vectors of a shard", self._streams.device):
            passes = tuple(_ModelPass(runner, work, self._streams) for runner, work in pairs)
        shard = _ShardPass(prepared, passes, begun)
        for model in passes:
            for batch in model.work.batches:
                is_last = model is passes[-1] and batch is model.work.batches[-1]
                yield _Launched(batch, model, model.launch(batch), shard if is_last else None)

    def _settle(self, launched: _Launched, ended: float) -> Generator[ComputedShard, None, float]:
        """Waits for a batch, repairs it where needed, and yields its shard if that is complete.

        Args:
            launched: the batch that was launched first of those not yet settled.
            ended: when the shard before was complete.

        Returns:
            When the last complete shard was.
        """
        [all_finite] = launched.all_finite.wait()
        if not all_finite:
            launched.model.repair(launched.batch)
        if (shard := launched.completes) is None:
            return ended
        complete = time.perf_counter()
        with memory_for("the vectors of a shard", self._streams.device):
            computed = self._finish(shard, forward_seconds=complete - max(shard.begun, ended))
        yield computed
        return complete

    @torch.inference_mode()
    def _finish(self, shard: _ShardPass, forward_seconds: float) -> ComputedShard:
        """From the vectors of distinct sequences to those of all rows, their scores, and to the host."""
        begun = time.perf_counter()
        vectors: dict[str, Tensor] = {}
        for model in shard.models:
            with self._streams.uploading():
                places = model.work.places.to(self._streams.device, non_blocking=True)
            self._streams.hand_over(places)
            name = "dna" if model.runner.planned.family == "dnabert_s" else "protein"
            vectors[name] = model.vectors.index_select(0, places)
        results: dict[str, Tensor] = {}
        if (dtype := _STORED_DTYPES.get(self._plan.embeddings)) is not None:
            results |= {name: tensor.to(dtype) for name, tensor in vectors.items()}
        if self._scorer is not None:
            results["scores"] = self._scorer.launch(vectors["dna"], vectors["protein"])
        prepared = shard.prepared
        letters = {model.runner.planned.family: model.work.letters for model in shard.models}
        return ComputedShard(
            shard=prepared.shard,
            names=tuple(results),
            download=self._streams.download(*results.values()),
            counters=ShardCounters(
                frames=prepared.shard.end - prepared.shard.begin,
                residues=letters.get("esm2", 0),
                bases=letters.get("dnabert_s", 0),
                models=tuple(model.counters for model in shard.models),
            ),
            seconds=StageSeconds(
                tokenize=prepared.seconds, forward=forward_seconds, score=time.perf_counter() - begun
            ),
        )


def _require_same_head(planned: PlannedHead) -> None:
    if (found := classifier_fingerprint(Path(planned.location))) != planned.fingerprint:
        raise MismatchError(
            f"head {planned.name} ({planned.location}) has changed since the run was planned: fingerprint "
            f"{planned.fingerprint[:12]}, now {found[:12]}. Put the old one back, or start over with --force."
        )
