"""Collating a shard in a background thread: order, bounds, errors, and no leaked threads."""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.made_models import MadeRun
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.errors import MismatchError
from virnuc_core.inference.device import Streams
from virnuc_core.inference.plan import Shard
from virnuc_core.inference.prefetch import Collator, HostBatch, ModelInputs, Prefetcher


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_results_are_in_order_and_made_elsewhere() -> None:
    def double(item: int) -> tuple[int, int]:
        return 2 * item, threading.get_ident()

    with Prefetcher(double, range(7), depth=2) as results:
        doubled, threads = zip(*results, strict=True)
    assert doubled == (0, 2, 4, 6, 8, 10, 12)
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_no_more_than_asked_for_is_prefetched() -> None:
    drawn = []

    def draw() -> Iterator[int]:
        for item in range(10):
            drawn.append(item)
            yield item

    with Prefetcher(lambda item: item, draw(), depth=2) as results:
        assert drawn == [0, 1, 2]
        assert next(results) == 0
        assert drawn == [0, 1, 2]
        assert next(results) == 1
        assert drawn == [0, 1, 2, 3]


def test_an_error_comes_out_in_its_place() -> None:
    def fail_at_two(item: int) -> int:
        if item == 2:
            raise OSError(28, "No space left on device")
        return item

    with Prefetcher(fail_at_two, range(5), depth=1) as results:
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(OSError, match="No space left"):
            next(results)

    def draw() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), Prefetcher(done.append, draw(), depth=3) as results:
        list(results)
    assert done == [1]


def test_a_caller_that_stops_waits_for_what_was_begun_only() -> None:
    done = []

    def slow(item: int) -> None:
        time.sleep(0.05)
        done.append(item)

    with Prefetcher(slow, range(100), depth=50) as results:
        next(results)
    assert 1 <= len(done) <= 3


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


def test_a_store_without_the_sequences_is_refused(finished_run: MadeRun) -> None:
    store = replace(finished_run.store, protein=None)
    collator = Collator(store, ((finished_run.plan.models[1], Esm2Tokenizer()),), Streams("cpu"))
    with pytest.raises(MismatchError, match="needs sequences of a kind"):
        collator.collate(finished_run.plan.shards[0])
