"""Record names that are unique, however often the input repeats one."""

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from virnuc_core.columns import ByteColumn

Int32 = npt.NDArray[np.int32]

_BLOCK_ROWS = 1 << 16


class NameRegister:
    """Remembers 8 bytes of every name, and from them which names came before.

    Two different names share their 64-bit hash about once in 10^5 inputs of 10^7 records; the later one is
    then renamed without need, which keeps it unique all the same.
    """

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, name: bytes) -> None:
        """Notes the name of the next record."""
        self._hashes.append(hash(name))

    def repeats(self, names: ByteColumn) -> Int32:
        """Finds the records whose name an earlier record has.

        Args:
            names: every name that was added, in the same order.

        Returns:
            int32 (n,): 0 for a name that is new; else the number that makes it unique as
            `NAME_dupNUMBER`: 2 for the second of its name, 3 for the third, and so on, leaving out numbers
            that would give a name of the input.
        """
        hashes = np.array(self._hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        known = hashes[order]
        numbers = np.zeros(len(hashes), np.int32)
        for place in np.flatnonzero(known[1:] == known[:-1]):
            previous, row = order[place], order[place + 1]
            name = bytes(names.data[names.offsets[row] : names.offsets[row + 1]])
            number = max(int(numbers[previous]), 1) + 1
            while _contains(known, hash(numbered_name(name, number))):
                number += 1
            numbers[row] = number
        return numbers


def numbered_name(name: bytes, number: int) -> bytes:
    """The name of the number-th record of that name."""
    return name + b"_dup%d" % number


def renamed(names: ByteColumn, numbers: Int32) -> Iterator[ByteColumn]:
    """Yields all names, block by block, with the rows in `numbers` renamed."""
    for begin in range(0, len(names), _BLOCK_ROWS):
        end = min(begin + _BLOCK_ROWS, len(names))
        yield ByteColumn.from_strings(
            numbered_name(name.encode(), number) if number else name
            for name, number in zip(
                names.rows(begin, end).to_strings(), numbers[begin:end].tolist(), strict=True
            )
        )


def _contains(ascending: npt.NDArray[np.int64], value: int) -> bool:
    place = int(np.searchsorted(ascending, value))
    return place < len(ascending) and int(ascending[place]) == value
