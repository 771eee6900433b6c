"""Running out of memory: batches get smaller, and a sequence that fits nowhere is named."""

import logging
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tests.made_models import MadeModels, MadeRun
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.errors import DeviceError, DeviceMemoryError
from virnuc_core.inference.engine import Embedder
from virnuc_core.inference.model_runner import ModelRunner
from virnuc_core.inference.plan import Shard
from virnuc_core.inference.prefetch import Preparer
from virnuc_core.inference.resident import ResidentModel, memory_for
from virnuc_core.inference.shard import ShardResult
from virnuc_core.inference.streams import HostStreams
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.encoder import Encoder
from virnuc_core.models.loading import load_model
from virnuc_core.specs import AttentionBackend

STREAMS = HostStreams("cpu")


class SmallMemory(Encoder):
    """A model on a device that holds so many tokens."""

    def __init__(self, model: Encoder, most_tokens: int) -> None:
        super().__init__(model.spec)
        self.model = model
        self.most_tokens = most_tokens
        self.tried: list[int] = []

    def build_layout(self, cu_seqlens: npt.NDArray[np.int32], backend: AttentionBackend) -> PackedLayout:
        return self.model.build_layout(cu_seqlens, backend)

    def embed(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        self.tried.append(len(input_ids))
        if len(input_ids) > self.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.model.embed(input_ids, layout, repr_layer)


def embed_proteins(run: MadeRun, made_models: MadeModels, most_tokens: int) -> tuple[ShardResult, list[int]]:
    """Every protein of a run, on a device with memory for so many tokens, and the sizes tried on the way."""
    planned = replace(run.plan.models[1], token_budget=1000)
    model, _ = load_model(resolve_checkpoint(planned.location, "esm2"), "cpu", "fp32")
    small = SmallMemory(model, most_tokens)
    resident = ResidentModel(planned, small, STREAMS, "fp32", "sdpa")
    runner = ModelRunner(planned, STREAMS, resident, lambda: resident)
    embedder = Embedder(replace(run.plan, models=(planned,)), STREAMS, (runner,), None)
    shard = Shard(index=0, begin=0, end=run.store.num_frames, cost=1.0)
    preparer = Preparer(run.store, ((planned, Esm2Tokenizer()),), STREAMS)
    [computed] = embedder.run([preparer.prepare(shard)])
    return computed.result(), small.tried


def test_batches_are_halved_until_they_fit(
    finished_run: MadeRun, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    expected, tried = embed_proteins(finished_run, made_models, 10**9)
    assert expected.counters.models[0].out_of_memory == 0
    assert len(tried) == expected.counters.models[0].batches == 5
    with caplog.at_level(logging.WARNING):
        result, tried = embed_proteins(finished_run, made_models, 300)
    assert result.counters.models[0].out_of_memory == 2
    assert tried[0] >= 2 * tried[1] > 600
    assert max(tried[2:]) <= 250
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "ran out of memory in model esm2_t4_made.pt on a batch of" in caplog.text
    assert result.protein is not None
    np.testing.assert_allclose(result.protein, expected.protein, atol=1e-5, rtol=0)


def test_a_sequence_that_fits_nowhere_is_named_and_not_tried_again(
    finished_run: MadeRun, made_models: MadeModels
) -> None:
    assert finished_run.store.protein is not None
    longest = int(finished_run.store.protein.lengths.argmax())
    [name] = finished_run.store.frame_ids(longest, longest + 1)
    with pytest.raises(DeviceError, match=rf"on {name} alone \(22 tokens\)") as caught:
        embed_proteins(finished_run, made_models, 21)
    assert not caught.value.retryable


def test_a_device_that_is_full_before_the_work_begins_may_be_tried_again(finished_run: MadeRun) -> None:
    planned = finished_run.plan.models[1]
    model, _ = load_model(resolve_checkpoint(planned.location, "esm2"), "cpu", "fp32")
    resident = ResidentModel(planned, SmallMemory(model, 1), STREAMS, "fp32", "sdpa")
    with pytest.raises(DeviceMemoryError, match="no memory left for even a small batch") as caught:
        ModelRunner(planned, STREAMS, resident, lambda: resident).warm_up()
    assert caught.value.retryable


def test_what_a_block_needs_memory_for_is_named() -> None:
    with (
        pytest.raises(DeviceMemoryError, match="cpu has not enough memory for the vectors"),
        memory_for("the vectors", "cpu"),
    ):
        raise torch.OutOfMemoryError("out of memory")
    with (
        pytest.raises(DeviceMemoryError, match="this host has not enough memory for the vectors"),
        memory_for("the vectors", "cuda:0"),
    ):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="other"), memory_for("the vectors", "cpu"):
        raise RuntimeError("other")
