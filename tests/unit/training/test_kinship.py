import random

import numpy as np
import pytest

from virnuc_core.training.kinship import KMER_LENGTH, KinshipSketches, join_groups, sampled_kmers

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


def test_joined_groups_are_the_finest_that_split_neither() -> None:
    first, second = np.array([0, 0, 1, 2, 3]), np.array([5, 6, 6, 7, 8])
    joined = join_groups(first, second)
    assert joined[0] == joined[1] == joined[2]
    assert len(set(joined.tolist())) == 3
