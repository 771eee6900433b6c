"""Collating a shard: batches, and no leaked threads."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from tests.made_models import MadeRun
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.inference.device import Streams
from virnuc_core.inference.plan import Shard
from virnuc_core.inference.prefetch import Collator, HostBatch, ModelInputs

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def sequences_of(batches: Iterable[HostBatch]) -> list[list[int]]:
    return [ids.tolist() for b in batches for ids in np.split(b.input_ids.numpy(), b.cu_seqlens[1:-1])]


def test_a_collated_shard_holds_every_sequence_of_its_rows(finished_run: MadeRun) -> None:
    store, planned = finished_run.store, replace(finished_run.plan.models[1], token_budget=200)
    shard = Shard(index=0, begin=10, end=60, cost=1.0)
    inputs = Collator(store, ((planned, Esm2Tokenizer()),), Streams("cpu")).collate(shard)
    [model] = inputs.models
    assert isinstance(model, ModelInputs)
    assert store.protein is not None
    proteins = store.protein.rows(10, 60)
    assert len(model.batches) == -(-model.counters.tokens // 200) == 5
    assert (inputs.counters.residues, inputs.counters.bases) == (proteins.lengths.sum(), 0)
    assert all(batch.num_tokens <= 200 for batch in model.batches)
    assert [batch.offset for batch in model.batches] == np.cumsum([0, *map(len, model.batches)])[:-1].tolist()
    found = sequences_of(model.batches)
    tokens = Esm2Tokenizer().encode(proteins)
    for row, index in enumerate(model.vector_index.tolist()):
        assert found[index] == tokens.input_ids[tokens.offsets[row] : tokens.offsets[row + 1]].tolist()
    assert model.frame_id(int(model.vector_index[7])) == store.frame_ids(17, 18)[0]
    chosen = np.array([0, 3, len(found) - 1])
    selected = model.select(chosen)
    assert [batch.offset for batch in selected] == [0, 2]
    assert sequences_of(selected) == [found[index] for index in chosen]
