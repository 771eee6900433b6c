"""How a batch is cut into programs of the attention kernels, and what fits on a device.

Shapes: B sequences, H head dim.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

BLOCK: Final = 64  # queries and keys of a step
RESIDENT_TOKENS: Final = 3 * BLOCK
EMPTY: Final = 2  # rows of a list of no tiles
_FEWEST: Final = 3  # rows of any other
_NARROWEST: Final = 32  # two halves of 16 columns, the fewest that tensor cores multiply


def padded_head_dim(head_dim: int) -> int:
    """Columns of a head as the kernels hold it."""
    return max(_NARROWEST, 1 << (head_dim - 1).bit_length())


def fits_resident(head_dim: int, shared_memory: int) -> bool:
    """Whether the keys and values of `RESIDENT_TOKENS` and a block of queries fit in shared memory.

    Args:
        head_dim: H.
        shared_memory: bytes that one block may have on the device.
    """
    columns = (2 * RESIDENT_TOKENS + BLOCK) * padded_head_dim(head_dim)
    return columns * torch.float16.itemsize <= shared_memory


def plan_tiles(
    cu_seqlens: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The programs of a batch.

    Args:
        cu_seqlens: int32 (B + 1,), starting at 0.

    Returns:
        For sequences of at most `RESIDENT_TOKENS` and for longer ones: int32 (tiles, 3) of a sequence's
        first token, its length, and the first query of the tile. A list of two rows is an empty one, and
        any other is filled up to three with tiles of length 0: code would be compiled once more for a size
        of 0 or 1.
    """
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    is_long = lengths > RESIDENT_TOKENS
    counts = -(-lengths[is_long] // BLOCK)
    firsts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    short = np.stack((starts[~is_long], lengths[~is_long], np.zeros_like(starts[~is_long])), axis=1)
    long = np.stack(
        (np.repeat(starts[is_long], counts), np.repeat(lengths[is_long], counts), firsts * BLOCK), axis=1
    )
    return _filled_up(short), _filled_up(long)


def _filled_up(tiles: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    missing = max(0, (_FEWEST if len(tiles) else EMPTY) - len(tiles))
    return np.pad(tiles, ((0, missing), (0, 0))).astype(np.int32)
