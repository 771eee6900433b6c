import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc_core.training.kinship import KIN_SHARE, KMER_LENGTH, KinshipSketches, join_groups, sampled_kmers

COMPLEMENT = str.maketrans("ACGT", "TGCA")
EVERYTHING = 1 << 63 << 1


def dna(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=length))


def mutated(sequence: str, every: int, seed: int = 0) -> str:
    draws = random.Random(seed)
    return "".join(
        draws.choice("ACGT".replace(base, "")) if draws.random() < 1 / every else base for base in sequence
    )


def groups_of(*sequences: str, most_samples: int = 1 << 25) -> list[int]:
    sketches = KinshipSketches(most_samples)
    for sequence in sequences:
        sketches.add(sequence.encode())
    return sketches.groups().tolist()


def test_a_kmer_is_the_same_on_both_strands_and_odd_letters_are_in_none() -> None:
    sequence = dna(300, 1)
    reverse = sequence.translate(COMPLEMENT)[::-1]
    forward = sampled_kmers(sequence.encode(), EVERYTHING - 1)
    assert len(forward) == 300 - KMER_LENGTH + 1
    np.testing.assert_array_equal(forward, sampled_kmers(reverse.encode(), EVERYTHING - 1))
    broken = sequence[:100] + "N" + sequence[101:]
    assert len(sampled_kmers(broken.encode(), EVERYTHING - 1)) == len(forward) - KMER_LENGTH
    assert len(sampled_kmers(sequence[:20].encode(), EVERYTHING - 1)) == 0


def test_what_is_sampled_is_a_share_of_all() -> None:
    sequence = dna(40_000, 2).encode()
    kmers, sample = sampled_kmers(sequence, EVERYTHING - 1), sampled_kmers(sequence, EVERYTHING // 16)
    assert set(sample) <= set(kmers)
    assert len(sample) == pytest.approx(len(kmers) / 16, rel=0.1)


def test_blocks_of_a_long_record_lose_no_kmer(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = dna(5000, 3).encode()
    whole = sampled_kmers(sequence, EVERYTHING - 1)
    monkeypatch.setattr("virnuc_core.training.kinship._BLOCK_BASES", 700)
    np.testing.assert_array_equal(sampled_kmers(sequence, EVERYTHING - 1), whole)


def test_relatives_are_together_and_strangers_are_not() -> None:
    genome = dna(20_000, 4)
    fragment = genome[5000:6500].translate(COMPLEMENT)[::-1]
    relative, distant = mutated(genome, every=50), mutated(genome, every=5)
    stranger = dna(20_000, 5)
    first, *others = groups_of(genome, stranger, fragment, relative, distant)
    assert [other == first for other in others] == [False, True, True, False]


def test_equal_records_without_any_kmer_are_together() -> None:
    short = "ACGTTGCA" + "A"
    groups = groups_of(short, "ACGTTGCC", short, short.translate(COMPLEMENT)[::-1])
    assert groups[0] == groups[2] == groups[3] != groups[1]
    assert groups_of() == []


def test_few_samples_find_kin_too() -> None:
    genome = dna(30_000, 6)
    groups = groups_of(genome, dna(30_000, 7), genome[:15_000], most_samples=500)
    assert groups[0] == groups[2] != groups[1]


def three_records() -> tuple[str, str, str]:
    """A fragment, a record that has 31 % of its k-mers, and a longer one that has half of these."""
    shared = dna(3_100, 8)
    return shared + dna(6_900, 10), shared + dna(10_000, 11), shared[:1_550] + dna(20_000, 12)


def test_every_pair_counts_and_not_only_that_with_the_longest() -> None:
    fragment, relative, longest = groups_of(*three_records())
    assert fragment == relative != longest


@st.composite
def related_records(draw: st.DrawFn) -> list[str]:
    """Records put together from a few segments, so that they share many shares of each other."""
    lengths = draw(st.lists(st.integers(25, 400), min_size=1, max_size=6))
    segments = [dna(length, seed) for seed, length in enumerate(lengths)]
    parts = st.lists(st.sampled_from(segments), min_size=1, max_size=5).map("".join)
    return draw(st.lists(parts, min_size=1, max_size=12))


@settings(deadline=None)
@given(records=related_records(), block=st.sampled_from([1, 50, 1 << 22]))
def test_groups_are_those_of_comparing_every_pair(records: list[str], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("virnuc_core.training.kinship._BLOCK_PAIRS", block)
        found = groups_of(*records)
    kmers = [set(sampled_kmers(record.encode(), EVERYTHING // 16)) | {record} for record in records]
    expected = list(range(len(records)))
    for one, other in itertools.combinations(range(len(records)), 2):
        shorter = min(one, other, key=lambda record: (len(records[record]), -record))
        if len(kmers[one] & kmers[other]) >= KIN_SHARE * len(kmers[shorter]):
            joined, left = expected[one], expected[other]
            expected = [joined if group == left else group for group in expected]
    assert [found.index(group) for group in found] == [expected.index(group) for group in expected]


def test_pairs_are_sampled_where_very_many_records_share_a_kmer(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = dna(400, 14)
    records = [*three_records(), *(repeat + dna(4_000, 15 + seed) for seed in range(20))]
    monkeypatch.setattr("virnuc_core.training.kinship._MOST_PAIRS", 1_000)  # of 4,700
    fragment, relative, *others = groups_of(*records)
    assert fragment == relative
    assert len({fragment, *others}) == 22


def test_joined_groups_are_the_finest_that_split_neither() -> None:
    first, second = np.array([0, 0, 1, 2, 3]), np.array([5, 6, 6, 7, 8])
    joined = join_groups(first, second)
    assert joined[0] == joined[1] == joined[2]
    assert len(set(joined.tolist())) == 3
