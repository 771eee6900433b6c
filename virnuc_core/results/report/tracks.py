"""The scores of chunks as a report holds them: one byte each for the contigs that are drawn, and a histogram of all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.results.report.rows import Contig, damaged, iter_blocks
from virnuc_core.results.writers import NOT_AVAILABLE

BINS: Final = 50
LEVELS: Final = 254
NO_SCORE: Final = 255
MIN_CHUNKS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracks:
    """The scores of all chunks, each as far as it is shown.

    Attributes:
        histogram: int64 (BINS,), scored chunks by p_virus.
        places: places of the contigs that are drawn, ascending.
        levels: `quantise`d scores of these, one contig after another.
    """

    histogram: npt.NDArray[np.int64]
    places: tuple[int, ...]
    levels: bytes


def quantise(p_virus: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Probabilities (n,) as bytes 0 to `LEVELS`, `NO_SCORE` for NaN.

    A level holds p up to 1/254 above level / 254, so 0.5, the border between the calls, is the border of a level.
    """
    levels = np.floor(np.nan_to_num(p_virus) * LEVELS).astype(np.uint8)
    levels[np.isnan(p_virus)] = NO_SCORE
    return levels


def histogram(p_virus: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """How many of the probabilities (n,) lie in each of `BINS` equal parts of 0 to 1; NaN are passed over."""
    known = p_virus[~np.isnan(p_virus)]
    bins = np.minimum((known * BINS + 1e-9).astype(np.int64), BINS - 1)
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def choose_tracks(contigs: Iterable[Contig], max_chunks: int) -> tuple[int, ...]:
    """Places of the contigs that are drawn: the first ones with enough chunks, as far as there is room.

    Args:
        contigs: the first is the one that matters most.
        max_chunks: chunks of all of them together.
    """
    chosen: list[int] = []
    room = max_chunks
    for contig in contigs:
        if contig.chunks >= MIN_CHUNKS and contig.scored_chunks and contig.chunks <= room:
            chosen.append(contig.place)
            room -= contig.chunks
    return tuple(sorted(chosen))


def read_tracks(predictions: Path, places: Sequence[int], num_chunks: int) -> Tracks:
    """Reads all chunks of a run, a block of rows at a time.

    Args:
        predictions: a predictions.tsv.
        places: of the contigs that are drawn, ascending.
        num_chunks: chunks of these together.

    Raises:
        DamagedFileError: it is not as virnuc writes it, or has other chunks.
    """
    counts = np.zeros(BINS, np.int64)
    wanted = np.array(places, np.int64)
    parts: list[bytes] = []
    place = -1
    for numbers, cells in iter_blocks(predictions, ("chunk", "p_virus")):
        p_virus = _probabilities(predictions, cells)
        counts += histogram(p_virus)
        # A contig begins at its chunk 1.
        at = place + np.cumsum(np.array(numbers) == "1")
        place = int(at[-1])
        parts.append(quantise(p_virus)[np.isin(at, wanted)].tobytes())
    levels = b"".join(parts)
    if len(levels) != num_chunks:
        raise damaged(predictions, f"{len(levels):,} chunks of contigs that have {num_chunks:,}")
    return Tracks(histogram=counts, places=tuple(places), levels=levels)


def _probabilities(path: Path, cells: tuple[str, ...]) -> npt.NDArray[np.float64]:
    try:
        values = np.array([np.nan if cell == NOT_AVAILABLE else float(cell) for cell in cells])
    except ValueError as error:
        raise damaged(path, error) from error
    if np.any((values < 0) | (values > 1)):
        raise damaged(path, "a probability is not between 0 and 1")
    return values
