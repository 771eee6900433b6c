"""Rows of the tables of a run, read as a stream, with their columns found by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Final

from virnuc_core.errors import DamagedFileError
from virnuc_core.results.writers import NOT_AVAILABLE

_BLOCK_ROWS: Final = 1 << 13


def iter_rows(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """The cells of the wanted columns, row by row.

    Args:
        path: a table with a header.
        columns: names of two or more columns, in the order in which their cells are to come.
        optional: further ones; where the table has no such column, every cell of it is `NOT_AVAILABLE`.

    Raises:
        DamagedFileError: the table or a column is missing, or a row is too short.
        OSError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            header = next(lines, "").rstrip("\n").split("\t")
            found = [header.index(name) for name in columns]
            found += [header.index(name) if name in header else -1 for name in optional]
            pick = itemgetter(*found)
            for line in lines:
                cells = line.rstrip("\n").split("\t")
                if len(cells) < len(header):
                    raise ValueError(f"the row {line!r:.60} has too few cells")
                cells.append(NOT_AVAILABLE)
                yield pick(cells)
    except (FileNotFoundError, ValueError) as error:
        raise damaged(path, error) from error


def iter_blocks(path: Path, columns: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The same by column: the cells of each column for many rows at a time."""
    rows = iter_rows(path, columns)
    while block := list(islice(rows, _BLOCK_ROWS)):
        yield tuple(zip(*block, strict=True))


def damaged(path: Path, why: object) -> DamagedFileError:
    """What is raised of a table that is not as virnuc writes it."""
    return DamagedFileError(f"{path} cannot be read as a table of a run ({why}): run the same command again.")


def optional_number(cell: str) -> float | None:
    """The number in a cell; None for `NOT_AVAILABLE`.

    Raises:
        ValueError: it is no finite number.
    """
    if cell == NOT_AVAILABLE:
        return None
    number = float(cell)
    if not isfinite(number):
        raise ValueError(f"{cell!r:.20} is no number")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A viral region of a contig as regions.tsv has it.

    Attributes:
        start: first base, from 1.
        end: last base.
        score: as its caller gives it.
        mean_p: mean p_virus of its scored chunks; None when none is scored.
        tier: "confident", "likely" or "unsure".
    """

    start: int
    end: int
    score: float | None
    mean_p: float | None
    tier: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Contig:
    """A contig as contigs.tsv has it, with its regions.

    Attributes:
        place: which row of the table, from 0.
        name: as in every table.
        length: bases.
        chunks: chunks of it.
        scored_chunks: those with a score.
        dna_alone_chunks: those of them whose score is of the DNA alone.
        viral_chunks: those called virus.
        mean_p: mean p_virus of the scored chunks; None when none is scored.
        call: "virus", "other" or "unscored".
        tier: how sure the call is; "NA" where nothing is said.
        regions: by position.
    """

    place: int
    name: str
    length: int
    chunks: int
    scored_chunks: int
    dna_alone_chunks: int
    viral_chunks: int
    mean_p: float | None
    call: str
    tier: str
    regions: tuple[Region, ...]

    @property
    def viral_bases(self) -> int:
        """Bases in viral regions."""
        return sum(region.end - region.start + 1 for region in self.regions)


def iter_contigs(contigs: Path, regions: Path) -> Iterator[Contig]:
    """Contigs in the order of the input, each with its regions; memory holds one of them.

    Args:
        contigs: a contigs.tsv.
        regions: the regions.tsv beside it, in the same order; it may be absent.

    Raises:
        DamagedFileError: one of them is not as virnuc writes it, or they do not belong together.
    """
    columns = ("contig", "length", "chunks", "scored_chunks", "viral_chunks", "mean_p", "call")
    waiting = _regions_by_contig(regions)
    following = next(waiting, None)
    try:
        for place, (name, length, chunks, scored, viral, mean_p, call, tier, dna_alone) in enumerate(
            iter_rows(contigs, columns, optional=("tier", "dna_alone_chunks"))
        ):
            own: tuple[Region, ...] = ()
            if following is not None and following[0] == name:
                own, following = following[1], next(waiting, None)
            yield Contig(
                place=place,
                name=name,
                length=int(length),
                chunks=int(chunks),
                scored_chunks=int(scored),
                dna_alone_chunks=int(dna_alone) if dna_alone != NOT_AVAILABLE else 0,
                viral_chunks=int(viral),
                mean_p=optional_number(mean_p),
                call=call,
                tier=tier,
                regions=own,
            )
    except ValueError as error:
        raise damaged(contigs, error) from error
    if following is not None:
        raise damaged(regions, f"{following[0]!r} is no contig of {contigs.name}, or not in its order")


def _regions_by_contig(path: Path) -> Iterator[tuple[str, tuple[Region, ...]]]:
    """Each contig that has regions, with all of them."""
    if not path.exists():
        return
    current, regions = "", list[Region]()
    try:
        for name, start, end, score, mean_p, tier in iter_rows(
            path, ("contig", "start", "end", "score", "mean_p", "tier")
        ):
            if name != current and regions:
                yield current, tuple(regions)
                regions = []
            current = name
            regions.append(
                Region(
                    start=int(start),
                    end=int(end),
                    score=optional_number(score),
                    mean_p=optional_number(mean_p),
                    tier=tier,
                )
            )
    except ValueError as error:
        raise damaged(path, error) from error
    if regions:
        yield current, tuple(regions)
