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
UInt8 = npt.NDArray[np.uint8]


def offsets_of(lengths: npt.ArrayLike) -> Int64:
    """Running sum of n lengths from 0, int64 (n + 1,)."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def concatenated_ranges(starts: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """Concatenates the n ranges starts[i]..starts[i] + lengths[i] - 1; also returns their offsets, int64 (n + 1,)."""
    offsets = offsets_of(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1]), offsets


@dataclass(frozen=True, slots=True)
class ByteColumn:
    """n byte strings stored end to end in a uint8 buffer; string i is data[offsets[i]:offsets[i + 1]].

    `offsets` is int64 (n + 1,), ascending, and may start above 0, so that a range of rows is a view.
    """

    data: UInt8
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
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets_of([len(s) for s in encoded]))

    @classmethod
    def gather(cls, source: UInt8, starts: Int64, lengths: Int64) -> Self:
        """Copies the ranges source[starts[i] : starts[i] + lengths[i]]."""
        index, offsets = concatenated_ranges(starts, lengths)
        return cls(source[index], offsets)

    def rows(self, begin: int, end: int) -> Self:
        """Rows begin..end-1 as a view."""
        return type(self)(self.data, self.offsets[begin : end + 1])

    def take(self, rows: Int64) -> Self:
        """Copies the given rows in the given order."""
        return self.gather(self.data, self.offsets[rows], self.lengths[rows])

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
