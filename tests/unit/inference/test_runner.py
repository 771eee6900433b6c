"""One device's work on shards: against the reference engine, when memory runs out, when numbers overflow, and scores."""

import logging
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.made_models import WIDTH, MadeModels, MadeRun, make_models, plan_run, write_contigs
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.errors import CheckpointError, DeviceError, DeviceMemoryError, MismatchError
from virnuc_core.inference.device import AsyncCopy, Streams
from virnuc_core.inference.events import StageSeconds
from virnuc_core.inference.plan import PlannedModel, Shard
from virnuc_core.inference.prefetch import Collator
from virnuc_core.inference.runner import ComputedShard, InferenceRunner, LoadedModels, ModelRunner, Scorer
from virnuc_core.inference.shard import ShardResult
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.heads import ContigHead, load_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import AttentionBackend


def run_all(run: MadeRun, **changes: object) -> ShardResult:
    """All rows of a run as one shard."""
    shard = Shard(index=0, begin=0, end=run.store.num_frames, cost=1.0)
    plan, models = replace(run.plan, shards=(shard,), **changes), LoadedModels("cpu")
    inputs = Collator.load(plan, run.store, models.streams).collate(shard)
    models.load(plan)
    rows: list[int] = []
    [computed] = InferenceRunner(plan, models, rows.append).run(iter([inputs]))
    assert rows == sorted(rows)
    assert rows[-1] == run.store.num_frames
    assert computed.shard == shard
    assert computed.seconds.forward > 0 < computed.seconds.tokenize
    return computed.result()


@pytest.fixture(scope="module")
def packed(finished_run: MadeRun) -> ShardResult:
    return run_all(finished_run)


def assert_close(left: ShardResult, right: ShardResult, tolerance: float) -> None:
    for name in ("dna", "protein", "scores"):
        np.testing.assert_allclose(getattr(left, name), getattr(right, name), atol=tolerance, rtol=0)


def test_the_work_is_counted(finished_run: MadeRun, packed: ShardResult) -> None:
    counters, store = packed.counters, finished_run.store
    amounts = (store.num_frames, store.protein.lengths.sum(), store.dna.lengths.sum())
    assert (counters.frames, counters.residues, counters.bases) == amounts
    dnabert, esm2 = counters.models
    assert (dnabert.family, esm2.family) == ("dnabert_s", "esm2")
    assert esm2.sequences == len(set(store.protein.to_strings()))
    assert esm2.tokens == counters.residues + 2 * counters.frames
    assert (esm2.fp32_batches, esm2.out_of_memory) == (0, 0)
    assert 0 < esm2.packing_efficiency <= 1


def test_equal_sequences_are_embedded_once(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = write_contigs(tmp_path / "once.fa", 12)
    left = run_all(plan_run(tmp_path / "once", fasta, made_models.config()))
    fasta.write_text(fasta.read_text() * 3)
    right = run_all(plan_run(tmp_path / "thrice", fasta, made_models.config()))
    assert right.counters.residues == 3 * left.counters.residues
    assert right.counters.models == left.counters.models
    for name in ("dna", "protein"):
        np.testing.assert_array_equal(np.tile(getattr(left, name), (3, 1)), getattr(right, name))


def test_what_is_stored(finished_run: MadeRun, packed: ShardResult) -> None:
    assert packed.dna.dtype == np.float32
    half = run_all(finished_run, embeddings="float16")
    assert (half.dna.dtype, half.protein.dtype, half.scores.dtype) == (np.float16, np.float16, np.float32)
    nothing = run_all(finished_run, embeddings="none")
    assert (nothing.dna, nothing.protein) == (None, None)
    for result in (half, nothing):
        np.testing.assert_array_equal(result.scores, packed.scores)


class FakeDevice(Encoder):
    """A model on a device that holds `max_tokens`, that overflows for sequences of some lengths, and records what it does."""

    def __init__(
        self,
        model: Encoder,
        name: str = "",
        events: list[str] | None = None,
        max_tokens: int = 10**9,
        overflowing: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(model.spec)
        self.model = model
        self.name = name
        self.events = [] if events is None else events
        self.max_tokens = max_tokens
        self.overflowing = overflowing
        self.tried: list[int] = []

    def to(self, device: torch.device | str) -> "FakeDevice":
        """A device of this kind has an index: cpu is the host and cpu:0 the device."""
        self.events.append(f"{self.name} to {device}")
        return self

    def build_layout(self, cu_seqlens: npt.NDArray[np.int32], backend: AttentionBackend) -> PackedLayout:
        return self.model.build_layout(cu_seqlens, backend)

    def embed(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        self.tried.append(len(input_ids))
        if len(input_ids) > self.max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        vectors = self.model.embed(input_ids, layout, repr_layer)
        lengths = layout.cu_seqlens.diff().tolist()
        self.events.append(f"{self.name} embeds {len(lengths)}")
        for number, length in enumerate(lengths):
            if length in self.overflowing:
                vectors[number, 0] = torch.inf
        return vectors


def protein_model(run: MadeRun) -> tuple[PlannedModel, Encoder]:
    planned = replace(run.plan.models[1], token_budget=1000)
    return planned, load_model(open_checkpoint(planned.location, "esm2"), "cpu", "fp32")


def embed_proteins(run: MadeRun, model: ModelRunner, streams: Streams, num_shards: int) -> list[ShardResult]:
    plan = replace(run.plan, models=(model.planned,), head=None)
    runner = InferenceRunner(plan, LoadedModels(str(streams.device), [model]))
    collator = Collator(run.store, ((model.planned, Esm2Tokenizer()),), streams)
    bounds = np.linspace(0, run.store.num_frames, num_shards + 1).astype(int).tolist()
    shards = [Shard(index=i, begin=bounds[i], end=bounds[i + 1], cost=1.0) for i in range(num_shards)]
    return [computed.result() for computed in runner.run(map(collator.collate, shards))]


def embed_within(run: MadeRun, max_tokens: int) -> tuple[ShardResult, list[int]]:
    """Every protein, on a device with memory for so many tokens, and the sizes tried on the way."""
    planned, model = protein_model(run)
    device, streams = FakeDevice(model, max_tokens=max_tokens), Streams("cpu")
    [result] = embed_proteins(run, ModelRunner(planned, device, streams), streams, 1)
    return result, device.tried


def test_batches_are_halved_until_they_fit(
    finished_run: MadeRun, packed: ShardResult, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result, tried = embed_within(finished_run, 300)
    assert result.counters.models[0].out_of_memory == 2
    assert tried[0] >= 2 * tried[1] > 600
    assert max(tried[2:]) <= 250
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2
    assert "ran out of memory in model esm2_t4_made.pt on a batch of" in caplog.text
    np.testing.assert_allclose(result.protein, packed.protein, atol=1e-5, rtol=0)


def test_what_one_run_ran_into_does_not_limit_the_next(finished_run: MadeRun) -> None:
    planned, model = protein_model(finished_run)
    device, streams = FakeDevice(model, max_tokens=300), Streams("cpu")
    models = LoadedModels("cpu", [ModelRunner(planned, device, streams)])
    plan = replace(finished_run.plan, models=(planned,), head=None)
    shard = Shard(index=0, begin=0, end=finished_run.store.num_frames, cost=1.0)
    inputs = Collator(finished_run.store, ((planned, Esm2Tokenizer()),), streams).collate(shard)
    tried = []
    for _ in range(2):
        device.tried.clear()
        [computed] = InferenceRunner(plan, models).run([inputs])
        assert computed.result().counters.models[0].out_of_memory == 2
        tried.append(list(device.tried))
    assert tried[0] == tried[1]


def test_a_sequence_that_fits_nowhere_is_named_and_not_tried_again(finished_run: MadeRun) -> None:
    longest = int(finished_run.store.protein.lengths.argmax())
    [name] = finished_run.store.frame_ids(longest, longest + 1)
    with pytest.raises(DeviceError, match=rf"on {name} alone \(22 tokens\)") as caught:
        embed_within(finished_run, 21)
    assert not caught.value.retryable


def test_a_device_that_is_full_before_the_work_begins_may_be_tried_again(finished_run: MadeRun) -> None:
    planned, model = protein_model(finished_run)
    runner = ModelRunner(planned, FakeDevice(model, max_tokens=1), Streams("cpu"))
    with pytest.raises(DeviceMemoryError, match="no memory left for even a small batch") as caught:
        runner.warm_up()
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("head.safetensors", r"head head\.safetensors .* has changed"),
        ("dnabert/model.safetensors", r"model dnabert .* changed since the run was planned"),
    ],
)
def test_a_changed_model_or_head_is_noticed(tmp_path: Path, file: str, message: str) -> None:
    run = plan_run(tmp_path / "run", write_contigs(tmp_path / "in.fa", 4), make_models(tmp_path).config())
    tensors = load_file(tmp_path / file)
    save_file({name: tensor + 1e-4 for name, tensor in tensors.items()}, tmp_path / file)
    with pytest.raises(MismatchError, match=message):
        LoadedModels("cpu").load(run.plan)


def test_only_the_sequences_that_overflow_are_computed_again_and_the_fp32_model_is_dropped(
    finished_run: MadeRun, packed: ShardResult
) -> None:
    longest = int(finished_run.store.protein.lengths.max()) + 2
    streams = Streams("cpu:0")
    alive: list[weakref.ref[FakeDevice]] = []
    events: list[str] = []

    def load(name: str, overflowing: frozenset[int] = frozenset()) -> ModelRunner:
        planned, model = protein_model(finished_run)
        device = FakeDevice(model, name, events, overflowing=overflowing)
        alive.append(weakref.ref(device))
        events.append(f"{name} is loaded")
        if name == "fp32":
            return ModelRunner(planned, device, streams)
        return ModelRunner(replace(planned, precision="fp16"), device, streams, lambda: load("fp32"))

    found = embed_proteins(finished_run, load("half", frozenset({longest})), streams, 2)
    vectors = np.concatenate([result.protein for result in found])
    np.testing.assert_allclose(vectors, packed.protein, atol=1e-5)
    for result in found:
        [counters] = result.counters.models
        assert 0 < counters.fp32_batches <= counters.batches
    again = [event for event in events if event.startswith("fp32 embeds")]
    num_sequences = sum(model.sequences for result in found for model in result.counters.models)
    assert 0 < sum(int(event.rpartition(" ")[2]) for event in again) < num_sequences / 2
    one_shard = ["half to cpu", "fp32 is loaded", "half to cpu:0"]
    moves = [event for event in events if "embeds" not in event]
    assert moves == ["half is loaded", *one_shard, *one_shard]
    assert [model() is None for model in alive[1:]] == [True, True]


DNA_WEIGHTS, BIAS = "dnabert/model.safetensors", "encoder.layer.1.mlp.wo.bias"


def run_with(folder: Path, file: str, name: str, value: float) -> MadeRun:
    """A small run on models of its own, of which some weights have this value."""
    models = make_models(folder)
    tensors = load_file(folder / file)
    tensors[name][:1] = value
    save_file(tensors, folder / file)
    return plan_run(folder / "run", write_contigs(folder / "in.fa", 4), models.config())


def test_what_overflows_in_fp16_is_computed_again_in_fp32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # More than fp16 can hold; the LayerNorm after it makes it small again.
    run = run_with(tmp_path, DNA_WEIGHTS, BIAS, 1e6)
    expected = run_all(run)
    dnabert, esm2 = run.plan.models
    result = run_all(run, models=(replace(dnabert, precision="fp16"), esm2))
    assert_close(result, expected, 0)
    counters = result.counters.models[0]
    assert counters.fp32_batches == counters.batches
    assert result.counters.models[1].fp32_batches == 0
    assert "non-finite values in fp16" in caplog.text
    assert "recomputing them in fp32" in caplog.text


@pytest.mark.parametrize(
    ("file", "name", "value", "message"),
    [
        (DNA_WEIGHTS, BIAS, torch.nan, r"dnabert is corrupt: layers\.1\.ffn_out\.bias contains"),
        (DNA_WEIGHTS, BIAS, 3e38, r"non-finite embeddings .*_chunk_1[FR]\d: its weights"),
        (
            "head.safetensors",
            "output_layer.weight",
            3e38,
            r"head produces non-finite scores for rows 0 to \d+",
        ),
    ],
)
def test_weights_that_are_not_finite_or_overflow_are_named(
    tmp_path: Path, file: str, name: str, value: float, message: str
) -> None:
    run = run_with(tmp_path, file, name, value)
    with pytest.raises(CheckpointError, match=message):
        run_all(run)


def test_vectors_that_float16_cannot_hold_are_an_error(packed: ShardResult) -> None:
    large = ComputedShard(
        shard=Shard(index=0, begin=3, end=5, cost=1.0),
        names=("protein",),
        copy=AsyncCopy((torch.full((2, 4), 1e5).half(),), None),
        counters=packed.counters,
        seconds=StageSeconds(),
    )
    with pytest.raises(CheckpointError, match=r"protein embeddings of rows 3 to 5 .* --embeddings float32"):
        large.result()


DNA, PROTEIN = np.random.default_rng(0).standard_normal((2, 700, WIDTH), np.float32)
SIZES = np.random.default_rng(1).integers((10, 160), (50, 500), (700, 2))


@pytest.mark.parametrize("name", ["head", "longest_head"])
@pytest.mark.parametrize("rows", [(0, 1), (3, 259), (255, 257), (600, 700), (5, 5)])
def test_neighbours_change_no_bit_of_a_score(
    made_models: MadeModels, name: str, rows: tuple[int, int]
) -> None:
    head, part = load_head(getattr(made_models, name)), slice(*rows)
    scorer = Scorer(head, "cpu")
    everything = scorer.score(DNA, PROTEIN, sizes=SIZES)
    for result, values in scorer.score(DNA[part], PROTEIN[part], sizes=SIZES[part]).items():
        np.testing.assert_array_equal(values, everything[result][part], strict=True)
    features = torch.from_numpy(np.concatenate((DNA, PROTEIN), axis=1))
    for result, values in head.score_rows(features, torch.from_numpy(SIZES)).items():
        assert everything[result].dtype == values.numpy().dtype
        np.testing.assert_allclose(everything[result], values.numpy(), atol=4e-3)
    np.testing.assert_allclose(everything["scores"].sum(1), 1, atol=1e-6)


def test_the_score_of_a_row_is_that_of_its_stored_code(made_models: MadeModels) -> None:
    head = load_head(made_models.longest_head)
    assert isinstance(head, ContigHead)
    found = Scorer(head, "cpu").score(DNA, PROTEIN, sizes=SIZES)
    assert (found["codes"].dtype, found["scores"].dtype) == (np.float16, np.float32)
    margin = head.virus_margin(head.chunk(torch.from_numpy(found["codes"]).float())) / 1.5
    np.testing.assert_allclose(found["scores"][:, 1], margin.sigmoid(), atol=1e-5)
