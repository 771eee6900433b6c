"""The engine on a GPU: agreement with the CPU, determinism, and error handling."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from virnuc_core.columns import ByteColumn
from virnuc_core.errors import DeviceMemoryError
from virnuc_core.inference import runner
from virnuc_core.inference.plan import RunPlan, Shard
from virnuc_core.inference.planning import make_plan
from virnuc_core.inference.prefetch import Collator
from virnuc_core.inference.runner import InferenceRunner, LoadedModels
from virnuc_core.inference.shard import ShardResult
from virnuc_core.models.checkpoint import Checkpoint, load_model
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.memory import empty_pinned
from virnuc_core.sequences.frame_store import FrameStore, StoreMeta
from virnuc_core.settings import RunConfig
from virnuc_core.specs import ResolvedPrecision

pytestmark = pytest.mark.gpu

NUM_ROWS = 3000
NUM_DISTINCT = 2000


def random_strings(letters: bytes, lengths: np.ndarray, seed: int) -> ByteColumn:
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    drawn = np.random.default_rng(seed).integers(len(letters), size=offsets[-1])
    return ByteColumn(np.frombuffer(letters, np.uint8)[drawn], offsets)


@pytest.fixture(scope="module")
def store() -> FrameStore:
    """Random frames in memory, a third of them repeated; each row is its own contig."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 330, NUM_DISTINCT)
    rows = np.concatenate(
        (np.arange(NUM_DISTINCT), random.integers(NUM_DISTINCT, size=NUM_ROWS - NUM_DISTINCT))
    )
    number = np.arange(NUM_ROWS)
    return FrameStore(
        folder=Path("in-memory"),
        meta=StoreMeta(
            chunk_length=500,
            alphabet="dna",
            frames="longest",
            inputs=(),
            num_records=NUM_ROWS,
            num_chunks=NUM_ROWS,
            num_frames=NUM_ROWS,
            num_rejected=0,
            num_renamed=0,
            content_sha256="0" * 64,
        ),
        record_length=3 * lengths[rows],
        record_number=number + 1,
        chunk_record=number,
        chunk_index=np.zeros_like(number),
        chunk_start=np.zeros_like(number),
        chunk_end=3 * lengths[rows],
        frame_chunk=number,
        frame_number=np.zeros(NUM_ROWS, np.uint8),
        frame_start=np.zeros_like(number),
        names=ByteColumn.from_strings(f"contig{row}" for row in number),
        sequences=None,
        protein=random_strings(b"LAGVSERTIDPKQNFYMHWC", lengths, 1).take(rows),
        dna=random_strings(b"ACGT", 3 * lengths, 2).take(rows),
    )


def plan_of(store: FrameStore, device: str = "cuda:0", num_shards: int = 3, **changes: object) -> RunPlan:
    """A plan with the bundled models and a few batches per shard."""
    config = RunConfig(**{"token_budget": 8192, **changes})
    bounds = np.linspace(0, NUM_ROWS, num_shards + 1).astype(int).tolist()
    shards = [
        Shard(index=index, begin=begin, end=end, cost=1.0)
        for index, (begin, end) in enumerate(pairwise(bounds))
    ]
    return replace(make_plan(config, store, "predict", (device,)), shards=tuple(shards))


def loaded(plan: RunPlan, device: str = "cuda:0") -> LoadedModels:
    models = LoadedModels(device)
    models.load(plan)
    return models


def compute(models: LoadedModels, store: FrameStore, plan: RunPlan) -> list[ShardResult]:
    collator, inference = Collator.load(plan, store, models.streams), InferenceRunner(plan, models)
    return [computed.result() for computed in inference.run(map(collator.collate, plan.shards))]


def run(store: FrameStore, plan: RunPlan, device: str = "cuda:0") -> list[ShardResult]:
    return compute(loaded(plan, device), store, plan)


def joined(results: list[ShardResult], name: str) -> np.ndarray:
    return np.concatenate([getattr(result, name) for result in results])


def worst_cosine(left: np.ndarray, right: np.ndarray) -> float:
    products = (left * right).sum(axis=1)
    return float((products / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)).min())


@pytest.fixture(scope="module")
def on_the_cpu(store: FrameStore) -> list[ShardResult]:
    plan = plan_of(store, "cpu", token_budget=2048, precision="fp32")
    return run(store, plan, "cpu")


@pytest.mark.parametrize(
    ("precision", "cosine", "score_error", "calls"),
    [("fp32", 0.999999, 1e-3, 0.999), ("fp16", 0.9995, 5e-3, 0.999), ("bf16", 0.9995, 2e-2, 0.998)],
)
def test_the_gpu_says_what_the_cpu_says(
    store: FrameStore,
    on_the_cpu: list[ShardResult],
    precision: str,
    cosine: float,
    score_error: float,
    calls: float,
) -> None:
    """A call may differ only where its score is within `score_error` of 0.5."""
    results = run(store, plan_of(store, precision=precision))
    for name in ("dna", "protein"):
        assert worst_cosine(joined(results, name), joined(on_the_cpu, name)) >= cosine
    mine, theirs = joined(results, "scores"), joined(on_the_cpu, "scores")
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=score_error)
    assert ((mine[:, 1] > mine[:, 0]) == (theirs[:, 1] > theirs[:, 0])).mean() >= calls
    assert all(model.fp32_batches == 0 for result in results for model in result.counters.models)


@pytest.fixture
def _all_memory_again() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_all_memory_again")
def test_out_of_memory_halves_the_batches_and_goes_on(
    store: FrameStore, on_the_cpu: list[ShardResult]
) -> None:
    plan = plan_of(store, token_budget=400_000, num_shards=1, precision="fp32")
    models = loaded(plan)
    torch.cuda.empty_cache()
    room = 400 * 2**20  # a forward pass over all tokens takes several times as much
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    [result] = compute(models, store, plan)
    assert sum(model.out_of_memory for model in result.counters.models) > 0
    for name in ("dna", "protein"):
        assert worst_cosine(getattr(result, name), joined(on_the_cpu, name)) >= 0.999999


def broken_loader(value: float) -> Callable[..., Encoder]:
    """A `load_model` that sets a bias of the last layer to a value its precision may not represent."""

    def load(
        checkpoint: Checkpoint, device: torch.device | str, precision: ResolvedPrecision, **_: object
    ) -> Encoder:
        model = load_model(checkpoint, device, precision)
        model.layers[-1].qkv.bias.data[-1] = value
        return model

    return load


def test_what_overflows_is_done_again_in_fp32(store: FrameStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load_model", broken_loader(1e6))
    expected = run(store, plan_of(store, precision="fp32"))
    results = run(store, plan_of(store, precision="fp16"))
    for result in results:
        assert all(model.fp32_batches == model.batches for model in result.counters.models)
    for name in ("dna", "protein"):
        assert worst_cosine(joined(results, name), joined(expected, name)) >= 0.999999


def test_memory_that_cannot_be_pinned_is_the_hosts_and_costs_the_device_nothing() -> None:
    with pytest.raises(DeviceMemoryError, match="cannot pin"):
        empty_pinned((2**42,), torch.uint8)
    assert torch.ones(4, device="cuda:0").sum().item() == 4
