"""Array types, and columns of byte strings: one buffer with offsets instead of a list of Python objects."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # slow to import
    import pyarrow as pa


Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def concatenated_ranges(starts: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """Concatenates the n ranges starts[i]..starts[i] + lengths[i] - 1; also returns their offsets, int64 (n + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1]), offsets


@dataclass(frozen=True, slots=True)
class ByteColumn:
    """n byte strings stored end to end in a uint8 buffer; string i is data[offsets[i]:offsets[i + 1]].

    `offsets` is int64 (n + 1,), ascending, and may start above 0, so that a range of rows is a view.
    """

    data: npt.NDArray[np.uint8]
    offsets: Int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """int64 (n,), in bytes."""
        return np.diff(self.offsets)

    @classmethod
    def from_strings(cls, strings: Iterable[str | bytes]) -> Self:
        """Builds a column; `str` is encoded as UTF-8."""
        encoded = [s.encode() if isinstance(s, str) else s for s in strings]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(s) for s in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def rows(self, begin: int, end: int) -> Self:
        """Rows begin..end-1 as a view."""
        return type(self)(self.data, self.offsets[begin : end + 1])

    def take(self, rows: Int64) -> Self:
        """Copies the given rows in the given order."""
        index, offsets = concatenated_ranges(self.offsets[rows], self.lengths[rows])
        return type(self)(self.data[index], offsets)

    def to_strings(self) -> list[str]:
        """Decodes all strings as UTF-8."""
        raw = self.data[self.offsets[0] : self.offsets[-1]].tobytes()
        bounds = (self.offsets - self.offsets[0]).tolist()
        return [raw[a:b].decode() for a, b in pairwise(bounds)]

    def to_arrow(self) -> "pa.StringArray":
        """As an Arrow array on the same bytes, which are UTF-8 and less than 2 GiB."""
        import pyarrow as pa

        data = self.data[self.offsets[0] : self.offsets[-1]]
        offsets = (self.offsets - self.offsets[0]).astype(np.int32)
        return pa.StringArray.from_buffers(len(self), pa.py_buffer(offsets), pa.py_buffer(data))
