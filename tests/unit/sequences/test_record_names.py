from collections.abc import Sequence

from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.record_names import NameRegister, renamed


def unique(names: Sequence[str]) -> list[str]:
    column = ByteColumn.from_strings(names)
    register = NameRegister()
    for name in names:
        register.add(name.encode())
    blocks = renamed(column, register.repeats(column))
    return [name for block in blocks for name in block.to_strings()]


def test_names_that_differ_stay() -> None:
    assert unique(["a", "b", "A", "a_dup2"]) == ["a", "b", "A", "a_dup2"]


def test_repeats_are_numbered_in_the_order_of_the_input() -> None:
    assert unique(["a", "b", "a", "b", "a"]) == ["a", "b", "a_dup2", "b_dup2", "a_dup3"]


def test_a_number_never_gives_a_name_of_the_input() -> None:
    assert unique(["a", "a", "a_dup2", "a", "a_dup3"]) == ["a", "a_dup4", "a_dup2", "a_dup5", "a_dup3"]
    assert len(set(unique(["a", "a_dup2", "a", "a_dup2", "a_dup2_dup2"]))) == 5


def test_names_of_more_than_one_block_and_other_alphabets() -> None:
    names = [f"contig_{i}" for i in range(70_000)] + ["contig_5", "Möwe", "Möwe"]
    result = unique(names)
    assert result[:70_000] == names[:70_000]
    assert result[70_000:] == ["contig_5_dup2", "Möwe", "Möwe_dup2"]


def test_no_names() -> None:
    assert unique([]) == []
