"""One device's work on a shard, against models run by hand on one sequence at a time."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.made_models import MadeModels, MadeRun, make_head, make_models, plan_run, write_contigs
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.inference.engine import ComputedShard, Embedder
from virnuc_core.inference.events import StageSeconds
from virnuc_core.inference.model_runner import ModelRunner
from virnuc_core.inference.plan import RunPlan, Shard
from virnuc_core.inference.planning import make_plan
from virnuc_core.inference.prefetch import Preparer
from virnuc_core.inference.resident import ResidentModel
from virnuc_core.inference.shard import ShardResult
from virnuc_core.inference.streams import HostStreams
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.loading import load_model
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import AttentionBackend


def compute(plan: RunPlan, store: FrameStore, shards: Sequence[Shard]) -> list[ShardResult]:
    streams = HostStreams("cpu")
    preparer = Preparer.load(plan, store, streams)
    computed = list(Embedder.load(plan, streams).run(map(preparer.prepare, shards)))
    assert [one.shard for one in computed] == list(shards)
    assert all(one.seconds.forward > 0 and one.seconds.tokenize > 0 for one in computed)
    return [one.result() for one in computed]


def whole(store: FrameStore) -> Shard:
    return Shard(index=0, begin=0, end=store.num_frames, cost=1.0)


def run_all(run: MadeRun, **changes: object) -> ShardResult:
    """All rows of a run as one shard."""
    plan = replace(run.plan, shards=(whole(run.store),), **changes)
    [result] = compute(plan, run.store, plan.shards)
    return result


def assert_close(left: ShardResult, right: ShardResult, tolerance: float) -> None:
    for name in ("dna", "protein", "scores"):
        a, b = getattr(left, name), getattr(right, name)
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


def test_packed_is_the_reference(finished_run: MadeRun, made_models: MadeModels) -> None:
    packed = run_all(finished_run)
    config = made_models.config(engine="reference")
    plan = make_plan(config, finished_run.store, "predict", ("cpu",))
    [reference] = compute(plan, finished_run.store, [whole(finished_run.store)])
    assert_close(packed, reference, 1e-5)
    assert all(model.batches == model.sequences for model in reference.counters.models)
    assert [model.packing_efficiency for model in reference.counters.models] == [1.0, 1.0]


def test_rows_are_in_row_order_whatever_the_shards(finished_run: MadeRun) -> None:
    everything = run_all(finished_run)
    parts = compute(finished_run.plan, finished_run.store, finished_run.plan.shards)
    for name in ("dna", "protein", "scores"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_allclose(joined, getattr(everything, name), atol=1e-5, rtol=0)


def test_the_work_is_counted(finished_run: MadeRun) -> None:
    counters = run_all(finished_run).counters
    store = finished_run.store
    assert store.protein is not None
    assert store.dna is not None
    assert counters.frames == store.num_frames
    assert counters.residues == store.protein.lengths.sum()
    assert counters.bases == store.dna.lengths.sum()
    dnabert, esm2 = counters.models
    assert (dnabert.family, esm2.family) == ("dnabert_s", "esm2")
    assert esm2.sequences == len(set(store.protein.to_strings()))
    assert esm2.tokens == counters.residues + 2 * counters.frames
    assert (esm2.fp32_batches, esm2.out_of_memory) == (0, 0)
    assert 0 < esm2.packing_efficiency <= 1


def test_equal_sequences_are_embedded_once(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = write_contigs(tmp_path / "once.fa", 12)
    once = plan_run(tmp_path / "once", fasta, made_models.config())
    fasta.write_text(fasta.read_text() * 3)
    thrice = plan_run(tmp_path / "thrice", fasta, made_models.config())
    left, right = run_all(once), run_all(thrice)
    assert right.counters.residues == 3 * left.counters.residues
    assert right.counters.models == left.counters.models
    for name in ("dna", "protein"):
        np.testing.assert_array_equal(np.tile(getattr(left, name), (3, 1)), getattr(right, name))


def test_padded_batches_give_the_same(finished_run: MadeRun) -> None:
    models = tuple(replace(model, attention="padded", token_budget=700) for model in finished_run.plan.models)
    packed, padded = run_all(finished_run), run_all(finished_run, models=models)
    assert_close(packed, padded, 1e-5)
    for model in padded.counters.models:
        assert 0.5 < model.packing_efficiency < 1


def test_scores_are_probabilities_of_both_classes(finished_run: MadeRun) -> None:
    scores = run_all(finished_run).scores
    assert scores is not None
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-6)
    assert 0 < (scores[:, 1] > 0.5).mean() < 1


def test_what_is_stored(finished_run: MadeRun) -> None:
    assert run_all(finished_run).dna.dtype == np.float32
    half = run_all(finished_run, embeddings="float16")
    assert (half.dna.dtype, half.protein.dtype, half.scores.dtype) == (np.float16, np.float16, np.float32)
    nothing = run_all(finished_run, embeddings="none")
    assert nothing.dna is None
    assert nothing.protein is None
    np.testing.assert_array_equal(nothing.scores, half.scores)


def test_one_model_alone(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    config = made_models.config(esm_model=None, head=None, chunk_length=None)
    run = plan_run(tmp_path, contigs, config, kind="embed")
    result = run_all(run)
    assert result.protein is None
    assert result.scores is None
    assert result.dna.shape == (40, 96)
    assert result.counters.residues == 0


@pytest.fixture
def own_run(tmp_path: Path) -> tuple[MadeModels, MadeRun]:
    """Models that a test may change after the run on them was planned."""
    models = make_models(tmp_path)
    return models, plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())


def test_changed_weights_are_noticed(own_run: tuple[MadeModels, MadeRun]) -> None:
    models, run = own_run
    weights = models.dnabert / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 1e-4 for name, tensor in tensors.items()}, weights)
    with pytest.raises(MismatchError, match=r"model dnabert .* changed since the run was planned"):
        Embedder.load(run.plan, HostStreams("cpu"))


def test_a_changed_head_is_noticed(own_run: tuple[MadeModels, MadeRun]) -> None:
    models, run = own_run
    make_head(models.head, 192, seed=5)
    with pytest.raises(MismatchError, match=r"head head\.safetensors .* has changed"):
        Embedder.load(run.plan, HostStreams("cpu"))


def change_bias(models: MadeModels, value: float) -> None:
    weights = models.dnabert / "model.safetensors"
    tensors = load_file(weights)
    tensors["encoder.layer.1.mlp.wo.bias"][0] = value
    save_file(tensors, weights)


def test_what_overflows_in_fp16_is_done_again_in_fp32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = make_models(tmp_path)
    change_bias(models, 1e6)  # more than fp16 can hold; the LayerNorm after it makes it small again
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())
    expected = run_all(run)
    dnabert, esm2 = run.plan.models
    result = run_all(run, models=(replace(dnabert, precision="fp16"), esm2))
    assert_close(result, expected, 0)
    counters = result.counters.models[0]
    assert counters.fp32_batches == counters.batches
    assert result.counters.models[1].fp32_batches == 0
    assert "not finite in fp16" in caplog.text
    assert "done again in fp32" in caplog.text


class Ledger(Encoder):
    """A model that tells of every move between devices and of every batch, and gives what it is told to for some."""

    def __init__(
        self, model: Encoder, name: str, events: list[str], overflowing: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(model.spec)
        self.model = model
        self.name = name
        self.events = events
        self.overflowing = overflowing

    def to(self, device: torch.device | str) -> "Ledger":
        """A device of this kind has an index: cpu is the host and cpu:0 the device."""
        self.events.append(f"{self.name} to {device}")
        return self

    def build_layout(self, cu_seqlens: np.ndarray, backend: AttentionBackend) -> PackedLayout:
        return self.model.build_layout(cu_seqlens, backend)

    def embed(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        vectors = self.model.embed(input_ids, layout, repr_layer)
        lengths = layout.cu_seqlens.diff().tolist()
        self.events.append(f"{self.name} embeds {len(lengths)}")
        for number, length in enumerate(lengths):
            if length in self.overflowing:
                vectors[number, 0] = torch.inf
        return vectors


def test_only_the_sequences_that_overflow_are_done_again_and_the_fp32_model_is_dropped(
    finished_run: MadeRun,
) -> None:
    planned = replace(finished_run.plan.models[1], precision="fp16", token_budget=1000)
    lengths = finished_run.store.protein.lengths + 2
    longest = int(lengths.max())
    streams = HostStreams("cpu:0")
    checkpoint = resolve_checkpoint(planned.location, "esm2")
    alive: list[weakref.ref[Ledger]] = []
    events: list[str] = []

    def load(name: str, overflowing: frozenset[int] = frozenset()) -> ResidentModel:
        model = Ledger(load_model(checkpoint, "cpu", "fp32")[0], name, events, overflowing)
        alive.append(weakref.ref(model))
        events.append(f"{name} is loaded")
        return ResidentModel(planned, model, streams, "fp32", "sdpa")

    def results(overflowing: frozenset[int]) -> tuple[ShardResult, ShardResult]:
        runner = ModelRunner(planned, streams, load("half", overflowing), lambda: load("fp32"))
        embedder = Embedder(replace(finished_run.plan, models=(planned,)), streams, (runner,), None)
        preparer = Preparer(finished_run.store, ((planned, Esm2Tokenizer()),), streams)
        half = finished_run.store.num_frames // 2
        shards = [
            Shard(index=0, begin=0, end=half, cost=1.0),
            Shard(index=1, begin=half, end=2 * half, cost=1.0),
        ]
        first, second = embedder.run(map(preparer.prepare, shards))
        return first.result(), second.result()

    expected = results(frozenset())
    assert not any("fp32" in event for event in events)
    events.clear()
    alive.clear()
    found = results(frozenset({longest}))
    for result, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(result.protein, exact.protein, atol=1e-6, rtol=0)
        [counters] = result.counters.models
        assert 0 < counters.fp32_batches <= counters.batches
    again = [event for event in events if event.startswith("fp32 embeds")]
    num_sequences = sum(model.sequences for result in found for model in result.counters.models)
    assert 0 < sum(int(event.rpartition(" ")[2]) for event in again) < num_sequences / 2
    moves = [event for event in events if "embeds" not in event]
    one_shard = ["half to cpu", "fp32 is loaded", "half to cpu:0"]
    assert moves == ["half is loaded", *one_shard, *one_shard]
    assert [model() is None for model in alive[1:]] == [True, True]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    models = make_models(tmp_path)
    change_bias(models, value)
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())
    with pytest.raises(CheckpointError, match=r"dnabert is broken: layers\.1\.ffn_out\.bias holds"):
        run_all(run)


def test_weights_that_overflow_are_an_error_that_names_layer_and_sequence(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    change_bias(models, 3e38)
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())
    message = r"dnabert gives vectors that are not finite .*_chunk_1[FR]\d, from layer 2 of \d on"
    with pytest.raises(CheckpointError, match=message):
        run_all(run)


def test_vectors_that_float16_cannot_hold_are_an_error(finished_run: MadeRun) -> None:
    large = ComputedShard(
        shard=Shard(index=0, begin=3, end=5, cost=1.0),
        names=("protein",),
        download=HostStreams("cpu").download(torch.full((2, 4), 1e5).half()),
        counters=run_all(finished_run).counters,
        seconds=StageSeconds(),
    )
    with pytest.raises(CheckpointError, match=r"protein vectors of rows 3 to 5 .* --embeddings float32"):
        large.result()


def test_a_head_that_overflows_is_an_error_not_a_score(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    weights = load_file(models.head)
    weights["output_layer.weight"][:] = 3e38
    save_file(weights, models.head)
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), models.config())
    with pytest.raises(CheckpointError, match=r"the head gives scores that are not finite for rows 0 to \d+"):
        run_all(run)
