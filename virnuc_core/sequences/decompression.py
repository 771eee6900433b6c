"""The content of gzip, bgzip, zstd, xz and bzip2 files, of one member or of several end to end."""

import bz2
import io
import lzma
from collections.abc import Callable
from typing import Final, Protocol, cast

from backports import zstd
from isal import igzip_lib

BUFFER_BYTES: Final = 1 << 17
_MAGICS: Final = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)},  # skippable frames
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
}
# Bytes that tell the beginning of one member from another; a bgzip member is a gzip member marked here.
_HEADER_BYTES: Final = 16
_BGZIP_MARK: Final = (slice(12, 16), b"BC\x02\x00")


class DamagedDataError(Exception):
    """Compressed data that contradict their checksum or format."""


class _Decompressor(Protocol):
    """What the decompressors of one member have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def _new_zstd() -> _Decompressor:
    # As wide a window as `zstd --long=31` makes.
    largest_window = zstd.DecompressionParameter.window_log_max.bounds()[1]
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: largest_window}
    return cast(_Decompressor, zstd.ZstdDecompressor(options=options))


_DECOMPRESSORS: Final[dict[str, Callable[[], _Decompressor]]] = {
    "gzip": lambda: igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP),
    "zstd": _new_zstd,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    "bzip2": bz2.BZ2Decompressor,
}
_DAMAGE: Final = (OSError, lzma.LZMAError, zstd.ZstdError, cast(type[Exception], igzip_lib.IsalError))


def decompressed(raw: io.BufferedReader) -> io.BufferedReader:
    """The content of an open file; the file itself when it is not compressed.

    What is read from it raises EOFError where the compressed data end early, and DamagedDataError where they are damaged.
    """
    compression = _compression_of(raw.peek(_HEADER_BYTES))
    return raw if compression is None else io.BufferedReader(_Members(raw, compression), BUFFER_BYTES)


class _Members(io.RawIOBase):
    """All members of a compressed file; zeros may stand between and behind them, as gzip, xz and tapes have them."""

    def __init__(self, raw: io.BufferedReader, compression: str) -> None:
        self._raw = raw
        self._compression = compression
        self._ahead = b""
        self._member: _Decompressor | None = None
        self._is_bgzip = self._lacks_end = False

    def readable(self) -> bool:
        """As io.BufferedReader asks."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the beginning of a buffer and returns how many bytes these are; 0 at the end.

        Raises:
            EOFError: the compressed data end early.
            DamagedDataError: they are damaged, or something else follows them.
        """
        while self._member is not None or self._begin_member():
            assert self._member is not None
            content = self._decompress(self._member, len(buffer))
            if content:
                # Cut between two blocks, a bgzip file is still a valid, shorter gzip file, but lacks its empty last block.
                self._lacks_end = self._is_bgzip
            if self._member.eof:
                self._ahead = self._member.unused_data
                self._member = None
            if content:
                buffer[: len(content)] = content
                return len(content)
        return 0

    def _decompress(self, member: _Decompressor, max_length: int) -> bytes:
        data = b""
        if member.needs_input:
            data, self._ahead = self._ahead or self._raw.read1(BUFFER_BYTES), b""
            if not data:
                raise EOFError("the compressed data end early")
        try:
            return member.decompress(data, max_length)
        except _DAMAGE as error:
            raise DamagedDataError(str(error)) from error

    def _begin_member(self) -> bool:
        """Goes on to the next member; False when there is none."""
        self._ahead = self._ahead.lstrip(b"\0")
        while len(self._ahead) < _HEADER_BYTES and (more := self._raw.read1(BUFFER_BYTES)):
            self._ahead = (self._ahead + more).lstrip(b"\0")
        where, mark = _BGZIP_MARK
        self._is_bgzip = self._compression == "gzip" and self._ahead[where] == mark
        is_cut = bool(self._ahead) and any(magic.startswith(self._ahead) for magic in _MAGICS)
        if is_cut or (self._lacks_end and not self._is_bgzip):
            raise EOFError("the compressed data end early")
        if not self._ahead:
            return False
        if _compression_of(self._ahead) != self._compression:
            raise DamagedDataError(f"its {self._compression} data are followed by something else")
        self._member = _DECOMPRESSORS[self._compression]()
        self._lacks_end = False
        return True


def _compression_of(start: bytes) -> str | None:
    return next((name for magic, name in _MAGICS.items() if start.startswith(magic)), None)
