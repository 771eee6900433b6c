"""One device's work on a shard: tokenize, pack, forward, pool, and score."""

import logging
import time
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from virnuc_core.batching.dnabert_tokenizer import DnabertTokenizer
from virnuc_core.batching.esm2_tokenizer import Esm2Tokenizer
from virnuc_core.batching.packed_batch import PackedBatch, TokenColumn
from virnuc_core.batching.packing import iter_batches, pack
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError, DeviceMemoryError, MismatchError
from virnuc_core.inference.device import ResolvedPrecision, torch_dtype
from virnuc_core.inference.events import StageSeconds
from virnuc_core.inference.scorer import Scorer
from virnuc_core.models.attention import AttentionBackend, resolve_attention
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.classifier import classifier_fingerprint
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.loading import load_model
from virnuc_core.models.pooling import mean_pool
from virnuc_core.models.weights import tokenizer_path, weights_fingerprint
from virnuc_core.run_plan import PlannedHead, PlannedModel, RunPlan, Shard
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.shard_file import ModelCounters, ShardCounters, ShardResult

_STORED_DTYPES: Final = {"float32": np.float32, "float16": np.float16}
_CPU_OUT_OF_MEMORY: Final = "can't allocate memory"

_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What both tokenizers have in common."""

    def encode(self, sequences: ByteColumn, /) -> TokenColumn:
        """Token ids, special tokens included, of every row."""


class ModelRunner:
    """One model on one device, from byte strings to mean vectors."""

    def __init__(self, planned: PlannedModel, model: Encoder, tokenizer: Tokenizer, device: str) -> None:
        self.planned = planned
        self._model = model
        self._tokenizer = tokenizer
        self._device = device

    @classmethod
    def load(cls, planned: PlannedModel, device: str, precision: ResolvedPrecision) -> Self:
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
                "ones back, or start over with --force."
            )
        model, _ = load_model(checkpoint, device, torch_dtype(precision))
        tokenizer: Tokenizer = Esm2Tokenizer()
        if planned.family == "dnabert_s":
            tokenizer = DnabertTokenizer(tokenizer_path(checkpoint))
        return cls(planned, model, tokenizer, device)

    def tokenize(self, sequences: ByteColumn) -> TokenColumn:
        """Token ids of n sequences."""
        return self._tokenizer.encode(sequences)

    def embed(
        self, tokens: TokenColumn, backend: AttentionBackend
    ) -> tuple[npt.NDArray[np.float32], ModelCounters]:
        """Mean vectors of n tokenized sequences.

        Args:
            tokens: n rows of token ids.
            backend: attention to use.

        Returns:
            fp32 (n, D) in row order, and the work done.

        Raises:
            DeviceMemoryError: a batch does not fit the device.
        """
        vectors = np.empty((len(tokens), self.planned.spec.embedding_dim), np.float32)
        packing = pack(tokens.num_tokens, self.planned.token_budget)
        for batch in iter_batches(tokens, packing):
            try:
                vectors[batch.rows] = self._forward(batch, backend)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not isinstance(error, torch.OutOfMemoryError) and _CPU_OUT_OF_MEMORY not in str(error):
                    raise
                raise DeviceMemoryError(
                    f"{self._device} ran out of memory in model {self.planned.name} on a batch of "
                    f"{batch.num_tokens} tokens, the longest sequence {batch.max_seqlen}. Choose a smaller "
                    "--token-budget, or a device with more memory."
                ) from error
        counters = ModelCounters(
            name=self.planned.name,
            family=self.planned.family,
            tokens=packing.num_tokens,
            batches=packing.num_batches,
            capacity=packing.capacity,
        )
        return vectors, counters

    def _forward(self, batch: PackedBatch, backend: AttentionBackend) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            layout = self._model.build_layout(batch.cu_seqlens, backend)
            input_ids = torch.from_numpy(batch.input_ids).to(self._device)
            hidden_states = self._model(input_ids, layout, self.planned.repr_layer)
            pooled = mean_pool(hidden_states, layout.cu_seqlens, specials=self._model.pools_specials)
            vectors: npt.NDArray[np.float32] = pooled.cpu().numpy()
        return vectors


class Embedder:
    """All models of a plan, resident on one device."""

    def __init__(self, plan: RunPlan, device: str, runners: tuple[ModelRunner, ...], scorer: Scorer | None):
        self._plan = plan
        self._runners = runners
        self._scorer = scorer
        self._backend = resolve_attention(plan.attention, device)

    @classmethod
    def load(cls, plan: RunPlan, device: str) -> Self:
        """Puts the plan's models and head on a device.

        Raises:
            CheckpointError: a model or the head cannot be read.
            MismatchError: one of them has changed since the plan was made.
        """
        runners = tuple(ModelRunner.load(model, device, plan.precision) for model in plan.models)
        scorer = None
        if plan.head is not None:
            _require_same_head(plan.head)
            scorer = Scorer(Path(plan.head.location), device)
        return cls(plan, device, runners, scorer)

    def run(self, store: FrameStore, shard: Shard) -> tuple[ShardResult, StageSeconds]:
        """Computes one shard; the result depends on the plan and the rows of the shard only.

        Raises:
            CheckpointError: a vector is not finite.
            DeviceMemoryError: a batch does not fit the device.
        """
        columns = {"dnabert_s": store.dna, "esm2": store.protein}
        vectors: dict[str, npt.NDArray[np.float32]] = {}
        counters: list[ModelCounters] = []
        seconds = StageSeconds()
        sizes = dict.fromkeys(columns, 0)
        for runner in self._runners:
            model = runner.planned
            column = columns[model.family]
            if column is None:
                raise MismatchError(
                    f"model {model.name} needs sequences of a kind that {store.folder} lacks."
                )
            begun = time.perf_counter()
            rows = column.rows(shard.begin, shard.end)
            sizes[model.family] = int(rows.offsets[-1] - rows.offsets[0])
            tokens = runner.tokenize(rows)
            tokenized = time.perf_counter()
            vectors[model.family], counted = runner.embed(tokens, self._backend)
            self._require_finite(model, vectors[model.family], store, shard)
            counters.append(counted)
            seconds += StageSeconds(tokenize=tokenized - begun, forward=time.perf_counter() - tokenized)
        begun = time.perf_counter()
        scores = None
        if self._scorer is not None:
            scores = self._scorer.score(vectors["dnabert_s"], vectors["esm2"])
        seconds += StageSeconds(score=time.perf_counter() - begun)
        result = ShardResult(
            dna=self._stored(vectors.get("dnabert_s")),
            protein=self._stored(vectors.get("esm2")),
            scores=scores,
            counters=ShardCounters(
                frames=shard.end - shard.begin,
                residues=sizes["esm2"],
                bases=sizes["dnabert_s"],
                models=tuple(counters),
            ),
        )
        return result, seconds

    def _stored(self, vectors: npt.NDArray[np.float32] | None) -> npt.NDArray[np.floating[Any]] | None:
        if vectors is None or self._plan.embeddings == "none":
            return None
        return vectors.astype(_STORED_DTYPES[self._plan.embeddings], copy=False)

    def _require_finite(
        self, model: PlannedModel, vectors: npt.NDArray[np.float32], store: FrameStore, shard: Shard
    ) -> None:
        finite = np.isfinite(vectors).all(axis=1)
        if finite.all():
            return
        first = shard.begin + int(np.argmin(finite))
        [name] = store.frame_ids(first, first + 1)
        way_out = "its weights are broken: fetch them again"
        if self._plan.precision != "fp32":
            way_out = "use --precision fp32"
        raise CheckpointError(
            f"model {model.name} gives vectors that are not finite in {self._plan.precision}, the first for "
            f"{name}: {way_out}."
        )


def _require_same_head(planned: PlannedHead) -> None:
    if (found := classifier_fingerprint(Path(planned.location))) != planned.fingerprint:
        raise MismatchError(
            f"head {planned.name} ({planned.location}) has changed since the run was planned: fingerprint "
            f"{planned.fingerprint[:12]}, now {found[:12]}. Put the old one back, or start over with --force."
        )
