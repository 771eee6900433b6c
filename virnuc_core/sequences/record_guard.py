"""Stops at a record that does not fit into memory before it is read: a few kB of compressed data may hold any amount."""

import io
from dataclasses import dataclass
from typing import Final

from virnuc_core.errors import InputError
from virnuc_core.host_memory import memory_limit

_BLOCK_BYTES: Final = 1 << 16
_SHARE_OF_MEMORY: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordShape:
    """What a parser holds in memory at once.

    Attributes:
        mark: a byte without which there is none of `begins`.
        begins: what stands where it lets go of all that came before.
        byte_cost: bytes of memory for each byte read since then, at most.
        line_cost: bytes of memory for each line end since then.
    """

    mark: bytes
    begins: tuple[bytes, ...]
    byte_cost: int
    line_cost: int


# The text, its letters, their copies in upper case and in the batch, and their frames; one Python string a line.
FASTA_RECORD: Final = RecordShape(mark=b">", begins=(b"\n>", b"\r>"), byte_cost=8, line_cost=64)
# A line is up to half of a record, of which the parser's growing buffer holds up to two copies.
FASTQ_LINE: Final = RecordShape(mark=b"\n", begins=(b"\n",), byte_cost=16, line_cost=0)


class RecordGuard(io.BufferedIOBase):
    """The bytes of a stream, and an end to them when one record would take more than half of the memory."""

    def __init__(self, stream: io.BufferedReader, shape: RecordShape, path: str) -> None:
        self._stream = stream
        self._shape = shape
        self._path = path
        self._most = _SHARE_OF_MEMORY * memory_limit()
        self._length = self._cost = 0
        self._last = b""

    def readable(self) -> bool:
        """As the parsers ask."""
        return True

    def read1(self, size: int = -1) -> bytes:
        """The next block, of whatever size is there.

        Raises:
            InputError: the record that goes on in it does not fit into memory.
        """
        block = self._stream.read1(_BLOCK_BYTES)
        self._add_up(block)
        return block

    def read(self, size: int | None = -1) -> bytes:
        """That many bytes, or fewer at the end.

        Raises:
            InputError: the record that goes on in them does not fit into memory.
        """
        block = self._stream.read(size)
        self._add_up(block)
        return block

    def _add_up(self, block: bytes) -> None:
        """Notes what the current record costs by now."""
        shape = self._shape
        # Most blocks of a long record have no mark, which is found out many times faster than the rest.
        if shape.mark in block:
            seen = self._last + block
            begin = max(map(seen.rfind, shape.begins))
            if begin >= 0:
                self._length = self._cost = 0
                block = seen[begin + 1 :]
        self._length += len(block)
        self._cost += len(block) * shape.byte_cost
        if shape.line_cost:
            num_lines = block.count(b"\n") + (block.count(b"\r") if b"\r" in block else 0)
            self._cost += num_lines * shape.line_cost
        if self._cost > self._most:
            raise InputError(
                f"{self._path} holds a record of more than {self._length:,} bytes, which does not fit into the memory "
                "of this machine. Split it, or leave it out."
            )
        self._last = block[-1:]
