"""Why a contig is called virus: what its log-odds lose without each chunk."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_models import make_contig_head
from virnuc_core.models.contig_head import ContigHead
from virnuc_core.results import contig_scores
from virnuc_core.results.contig_scores import chunk_evidence

HEAD = make_contig_head(6, 5)


def made_codes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 64)).astype(np.float32)


def margin(head: ContigHead, codes: np.ndarray, num_chunks: int) -> float:
    """Log-odds of one contig on the scale of so many chunks."""
    logits = head.contigs(torch.from_numpy(codes), torch.zeros(len(codes), dtype=torch.int64), 1).logits
    return float(head.contig_margin(logits, torch.tensor([num_chunks])))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=1, max_size=6))
def test_evidence_is_what_a_contig_loses_without_the_chunk(made: list[tuple[int, bool]]) -> None:
    lengths, is_virus = zip(*made, strict=True)
    codes = made_codes(sum(lengths))
    contig = np.repeat(np.arange(len(made)), lengths)
    evidence = chunk_evidence(HEAD, codes, contig, np.array(is_virus))
    for number, length in enumerate(lengths):
        own, found = codes[contig == number], evidence[contig == number]
        if not is_virus[number]:
            assert np.isnan(found).all()
        elif length == 1:
            assert found == pytest.approx(margin(HEAD, own, 1), abs=1e-4)
        else:
            rest = [margin(HEAD, np.delete(own, chunk, axis=0), length) for chunk in range(length)]
            np.testing.assert_allclose(found, margin(HEAD, own, length) - np.array(rest), atol=1e-3)


@pytest.mark.parametrize("most", [2, 3, 7, 30])
def test_long_contigs_lose_blocks_of_about_the_same_size(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contig_scores, "OCCLUSIONS", most)
    lengths = [17, 3, 1, 40]
    codes, contig = made_codes(sum(lengths)), np.repeat(np.arange(4), lengths)
    evidence = chunk_evidence(HEAD, codes, contig, np.ones(4, np.bool_))
    for number, length in enumerate(lengths):
        own, found = codes[contig == number], evidence[contig == number]
        if length == 1:
            continue
        blocks = min(length, most)
        bounds = [-(-i * length // blocks) for i in range(blocks + 1)]
        sizes = np.diff(bounds)
        assert sizes.max() - sizes.min() <= 1
        for begin, end in pairwise(bounds):
            lost = margin(HEAD, own, length) - margin(HEAD, np.delete(own, slice(begin, end), 0), length)
            np.testing.assert_allclose(found[begin:end], lost / (end - begin), atol=1e-3)


def test_evidence_of_a_contig_does_not_depend_on_its_neighbours_or_on_blocks() -> None:
    lengths = [5, 33, 2, 18]
    codes, contig = made_codes(sum(lengths)), np.repeat(np.arange(4), lengths)
    together = chunk_evidence(HEAD, codes, contig, np.ones(4, np.bool_))
    for number in range(4):
        own = contig == number
        alone = chunk_evidence(HEAD, codes, contig, np.arange(4) == number)
        np.testing.assert_allclose(alone[own], together[own], atol=1e-3)
        assert np.isnan(alone[~own]).all()
    for block in (1, 6, 39):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contig_scores, "_BLOCK_CHUNKS", block)
            found = chunk_evidence(HEAD, codes, contig, np.ones(4, np.bool_))
        np.testing.assert_allclose(found, together, atol=1e-3)
    assert np.isnan(chunk_evidence(HEAD, codes, contig, np.zeros(4, np.bool_))).all()
    assert len(chunk_evidence(HEAD, codes[:0], contig[:0], np.zeros(3, np.bool_))) == 0


def test_chunks_of_a_virus_speak_for_it_and_others_against() -> None:
    # A head that scores the mean code of a contig by its first number.
    head = make_contig_head(6, 5)
    with torch.no_grad():
        for parameter in head.contig.parameters():
            parameter.zero_()
        head.contig[0].weight[0, head.spec.context_width] = 1.0
        head.contig[0].bias[0] = 50.0  # where GELU is the identity
        head.contig[-1].weight[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
        head.contig[-1].bias[:] = torch.tensor([-50.0, -50.0, 50.0, 50.0])
    codes = made_codes(30)
    codes[:, 0] = np.where((np.arange(30) >= 10) & (np.arange(30) < 25), 3.0, -1.0)
    evidence = chunk_evidence(head, codes, np.zeros(30, np.int64), np.array([True]))
    assert (evidence[10:25] > 0).all()
    assert (evidence[:10] < 0).all()
    assert (evidence[25:] < 0).all()
    # What a chunk is above the mean of the others, shared by all: nothing is left over.
    assert evidence.sum() == pytest.approx(0, abs=1e-3)
