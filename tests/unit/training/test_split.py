import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.errors import InputError
from virnuc_core.training.split import PARTS, TEST, TRAIN, VALIDATION, split_records

RECORDS = st.lists(st.tuples(st.booleans(), st.integers(0, 25), st.booleans()), min_size=1, max_size=120)


@given(RECORDS, st.floats(0.01, 0.49), st.integers(0, 5))
def test_no_group_is_on_two_sides_and_each_side_has_both_classes(
    records: list[tuple[bool, int, bool]], held_out: float, seed: int
) -> None:
    is_viral, groups, is_usable = (np.array(column) for column in zip(*records, strict=True))
    try:
        part = split_records(is_viral, groups, is_usable, held_out, seed)
    except InputError:
        pure = [
            set(groups[(is_viral == viral) & is_usable]) - set(groups[is_viral != viral])
            for viral in (True, False)
        ]
        assert min(map(len, pure)) < 3
        return
    for group in set(groups.tolist()):
        assert len(set(part[groups == group].tolist())) == 1
    for number in range(len(PARTS)):
        for viral in (True, False):
            assert ((part == number) & (is_viral == viral) & is_usable).any()
    np.testing.assert_array_equal(part, split_records(is_viral, groups, is_usable, held_out, seed))


def test_shares_are_of_the_groups_of_a_class() -> None:
    is_viral = np.arange(300) < 100
    part = split_records(is_viral, np.arange(300), np.ones(300, bool), 0.2, seed=1)
    for viral, expected in ((True, [60, 20, 20]), (False, [120, 40, 40])):
        counts = np.bincount(part[is_viral == viral], minlength=3)
        assert counts.tolist() == expected


def test_a_group_of_both_classes_is_learnt_from(caplog: pytest.LogCaptureFixture) -> None:
    is_viral = np.array([True, False, *[True] * 5, *[False] * 5])
    groups = np.array([0, 0, *range(1, 11)])
    for seed in range(20):
        part = split_records(is_viral, groups, np.ones(12, bool), 0.4, seed)
        assert part[:2].tolist() == [TRAIN, TRAIN]
        assert {VALIDATION, TEST} <= set(part.tolist())
    assert "1 groups of related records hold viral and other records" in caplog.text


def test_too_few_groups_are_named() -> None:
    is_viral = np.array([True, True, True, False, False, False])
    groups = np.array([0, 0, 1, 2, 3, 4])
    with pytest.raises(InputError, match=r"2 groups of related viral records .* at least 3"):
        split_records(is_viral, groups, np.ones(6, bool), 0.1, seed=0)
