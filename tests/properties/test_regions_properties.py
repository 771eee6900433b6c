"""Properties of viral regions that hold for any scores and contigs."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.results.regions import ChunkScores, find_regions
from virnuc_core.sequences.frames import chunk_table

SCORES = st.one_of(st.floats(0, 1), st.just(float("nan")))


@st.composite
def made_chunks(draw: st.DrawFn) -> tuple[ChunkScores, list[int]]:
    """Contigs cut as in a run, with scores; and their lengths."""
    lengths = draw(st.lists(st.integers(1, 9_000), min_size=1, max_size=5))
    table = chunk_table(np.array(lengths), draw(st.sampled_from([60, 300, 500])))
    scores = draw(st.lists(SCORES, min_size=len(table), max_size=len(table)))
    chunks = ChunkScores(
        contig=table.record,
        start=table.start,
        end=table.end,
        p_virus=np.array(scores, np.float64),
        is_dna_alone=np.arange(len(table)) % 3 == 0,
    )
    return chunks, lengths


@given(made_chunks())
def test_regions_lie_apart_and_in_order_within_their_contigs(made: tuple[ChunkScores, list[int]]) -> None:
    chunks, lengths = made
    regions = find_regions(chunks)
    for region in regions:
        assert 0 <= region.start < region.end <= lengths[region.contig]
        own = slice(*np.searchsorted(chunks.contig, (region.contig, region.contig + 1)))
        inside = (chunks.start[own] >= region.start) & (chunks.end[own] <= region.end)
        assert inside.sum() == region.chunks
        assert chunks.is_dna_alone[own][inside].sum() == region.dna_alone_chunks
        p_virus = chunks.p_virus[own][inside]
        assert not np.isnan(p_virus).all()
        assert abs(region.mean_p - np.nanmean(p_virus)) < 1e-9
        assert np.isfinite(region.score)
    for left, right in pairwise(regions):
        assert (left.contig, left.end) < (right.contig, right.start)


@given(made_chunks(), st.data())
def test_a_contig_s_regions_depend_on_its_own_chunks_alone(
    made: tuple[ChunkScores, list[int]], data: st.DataObject
) -> None:
    chunks, lengths = made
    contig = data.draw(st.integers(0, len(lengths) - 1))
    own = chunks.contig == contig
    alone = find_regions(
        ChunkScores(
            contig=chunks.contig[own],
            start=chunks.start[own],
            end=chunks.end[own],
            p_virus=chunks.p_virus[own],
            is_dna_alone=chunks.is_dna_alone[own],
        )
    )
    assert alone == [region for region in find_regions(chunks) if region.contig == contig]
