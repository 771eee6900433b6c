"""The comparison with other programs: equal work, and correct timing."""

import random
import sys

import pytest
import torch

from benchmarks import flash_attn_stand_in
from benchmarks.peers import (
    RESIDUES,
    Peer,
    batches_of,
    fair_esm,
    hugging_face,
    measure_peer,
    residues_per_second,
)
from virnuc_core.models.hub import open_checkpoint

TINY = open_checkpoint("random:tiny", "esm2").spec


@pytest.fixture
def sequences() -> list[str]:
    letters = random.Random(0)
    return ["".join(letters.choices(RESIDUES, k=letters.randint(5, 60))) for _ in range(50)]


def test_batches_hold_every_sequence_once_and_keep_to_the_budget(sequences: list[str]) -> None:
    batches = batches_of(sequences, 256)
    assert sorted(sequence for batch in batches for sequence in batch) == sorted(sequences)
    assert all(len(batch) * (max(map(len, batch)) + 2) <= 256 for batch in batches)
    assert len(batches) > 5


def test_only_residues_after_the_warm_up_are_counted(sequences: list[str]) -> None:
    seen: list[list[str]] = []
    rate = residues_per_second(seen.append, batches_of(sequences, 256), 0.01)
    assert rate <= sum(len(sequence) for batch in seen[2:] for sequence in batch) / 0.01


@pytest.mark.parametrize("load", [fair_esm, hugging_face])
def test_peers_give_a_vector_a_sequence(load: type, sequences: list[str]) -> None:
    with torch.inference_mode():
        embed = load(TINY, "cpu", torch.float32)
        vectors = [vector for batch in batches_of(sequences, 512) for vector in embed(batch)]
    assert len(vectors) == len(sequences)
    assert all(vector.shape == (TINY.embedding_dim,) and vector.isfinite().all() for vector in vectors)


def test_a_peer_that_is_not_installed_is_left_out() -> None:
    peer = Peer("nothing fp32", "no_such_package", (1,), lambda spec, device: lambda batch: None)
    [row] = measure_peer(peer, "8M", {}, "cpu", 1.0)
    assert row["skipped"] == "no_such_package is not installed"


@pytest.mark.skipif(not flash_attn_stand_in.is_needed(), reason="the real flash-attn is there")
def test_the_stand_in_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.bert_padding"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    flash_attn_stand_in.provide()
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import pad_input

    assert flash_attn_varlen_func is flash_attn_stand_in.varlen_attention
    assert pad_input is None
