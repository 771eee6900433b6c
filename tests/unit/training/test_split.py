"""Related records are grouped, groups are split, and frames are sampled evenly."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc_core.errors import InputError
from virnuc_core.training.split import (
    KMER_LENGTH,
    MIN_SHARED_KMERS,
    PARTS,
    TEST,
    TRAIN,
    VALIDATION,
    KinshipSketches,
    sample_weights,
    sampled_kmers,
    split_records,
)

EVERYTHING = 1 << 63 << 1


def dna(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=length))


def reversed_strand(sequence: str) -> str:
    return sequence.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def groups_of(*sequences: str, **limits: int) -> list[int]:
    sketches = KinshipSketches(**limits)
    for sequence in sequences:
        sketches.add(sequence.encode())
    return sketches.groups().tolist()


def test_a_kmer_is_the_same_on_both_strands_and_odd_letters_are_in_none() -> None:
    sequence = dna(300, 1)
    forward = sampled_kmers(sequence.encode(), EVERYTHING - 1)
    assert len(forward) == 300 - KMER_LENGTH + 1
    np.testing.assert_array_equal(forward, sampled_kmers(reversed_strand(sequence).encode(), EVERYTHING - 1))
    broken = sequence[:100] + "N" + sequence[101:]
    assert len(sampled_kmers(broken.encode(), EVERYTHING - 1)) == len(forward) - KMER_LENGTH
    several_blocks = dna(4_500_000, 3)
    np.testing.assert_array_equal(
        sampled_kmers(several_blocks.encode(), EVERYTHING - 1),
        sampled_kmers(reversed_strand(several_blocks).encode(), EVERYTHING - 1),
    )


def test_relatives_are_together_and_strangers_are_not() -> None:
    genome, draws = dna(20_000, 4), random.Random(0)
    relative, distant = (
        "".join(draws.choice("ACGT") if draws.random() < share else base for base in genome)
        for share in (0.025, 0.25)
    )
    fragment = reversed_strand(genome[5000:6500])
    first, *others = groups_of(genome, dna(20_000, 5), fragment, relative, distant)
    assert [other == first for other in others] == [False, True, True, False]
    first, *others = groups_of(genome, dna(20_000, 5), genome[:10_000], max_samples=400)
    assert [other == first for other in others] == [False, True]
    short = "ACGTTGCAA"  # without any k-mer
    first, *others = groups_of(short, "ACGTTGCC", short, reversed_strand(short))
    assert [other == first for other in others] == [False, True, True]
    assert groups_of() == []


@pytest.mark.parametrize("max_pairs", [1_000, 10_000])  # of 4,700
def test_pairs_are_sampled_where_very_many_records_share_a_kmer(max_pairs: int) -> None:
    shared, repeat = dna(3_100, 8), dna(400, 14)
    # A record with 31 % of the k-mers of a fragment, a longer one that has half of these, and strangers.
    related = [shared + dna(6_900, 10), shared + dna(10_000, 11), shared[:1_550] + dna(20_000, 12)]
    strangers = [repeat + dna(4_000, 15 + i) for i in range(20)]
    fragment, relative, *others = groups_of(*related, *strangers, max_pairs=max_pairs)
    assert fragment == relative
    assert len({fragment, *others}) == 22


@st.composite
def related_records(draw: st.DrawFn) -> list[str]:
    """Records put together from a few segments, so that they share many shares of each other."""
    lengths = draw(st.lists(st.integers(25, 400), min_size=1, max_size=6))
    segments = [dna(length, seed) for seed, length in enumerate(lengths)]
    parts = st.lists(st.sampled_from(segments), min_size=1, max_size=5).map("".join)
    return draw(st.lists(parts, min_size=1, max_size=12))


@settings(deadline=None)
@given(records=related_records())
def test_groups_are_those_of_comparing_every_pair(records: list[str]) -> None:
    found = groups_of(*records)
    kmers = [set(sampled_kmers(record.encode(), EVERYTHING // 16)) | {record} for record in records]
    expected = list(range(len(records)))
    for one, other in itertools.combinations(range(len(records)), 2):
        shorter = min(one, other, key=lambda record: (len(records[record]), -record))
        if len(kmers[one] & kmers[other]) >= MIN_SHARED_KMERS * len(kmers[shorter]):
            joined, left = expected[one], expected[other]
            expected = [joined if group == left else group for group in expected]
    assert [found.index(group) for group in found] == [expected.index(group) for group in expected]


RECORDS = st.lists(st.tuples(st.booleans(), st.integers(0, 25), st.booleans()), min_size=1, max_size=120)


@given(RECORDS, st.floats(0.01, 0.49), st.integers(0, 5))
def test_no_group_is_on_two_sides_and_each_side_has_both_classes(
    records: list[tuple[bool, int, bool]], holdout_fraction: float, seed: int
) -> None:
    is_viral, groups, is_usable = (np.array(column) for column in zip(*records, strict=True))
    try:
        part = split_records(is_viral, groups, is_usable, holdout_fraction, seed)
    except InputError as error:
        message = str(error)
        pure = [
            set(groups[(is_viral == viral) & is_usable]) - set(groups[is_viral != viral])
            for viral in (True, False)
        ]
        assert min(map(len, pure)) < 3
        assert "at least 3" in message
        return
    for group in set(groups.tolist()):
        assert len(set(part[groups == group].tolist())) == 1
    for number in range(len(PARTS)):
        for viral in (True, False):
            assert ((part == number) & (is_viral == viral) & is_usable).any()
    np.testing.assert_array_equal(part, split_records(is_viral, groups, is_usable, holdout_fraction, seed))


def test_a_group_of_both_classes_is_for_training_only(caplog: pytest.LogCaptureFixture) -> None:
    is_viral = np.array([True, False, *[True] * 5, *[False] * 5])
    groups = np.array([0, 0, *range(1, 11)])
    for seed in range(20):
        part = split_records(is_viral, groups, np.ones(12, bool), 0.4, seed)
        assert part[:2].tolist() == [TRAIN, TRAIN]
        assert {VALIDATION, TEST} <= set(part.tolist())
    assert "1 groups of related records contain viral and other records" in caplog.text
    is_viral = np.arange(300) < 100
    part = split_records(is_viral, np.arange(300), np.ones(300, bool), 0.2, seed=1)
    assert np.bincount(part[is_viral]).tolist() == [60, 20, 20]
    assert np.bincount(part[~is_viral]).tolist() == [120, 40, 40]


def test_weights_are_class_balanced_and_grow_with_a_power_of_the_group() -> None:
    is_viral = np.array([True] * 16 + [True] * 4 + [False] * 3)
    groups = np.array([0] * 16 + [1] * 4 + [2] * 3)
    weights = sample_weights(is_viral, groups, 0.5)
    assert weights.sum() == pytest.approx(1)
    assert weights[is_viral].sum() == pytest.approx(0.5)
    assert weights[groups == 0].sum() / weights[groups == 1].sum() == pytest.approx(4 / 2)
    np.testing.assert_allclose(sample_weights(is_viral, groups, 1.0)[is_viral], 0.5 / 20)
