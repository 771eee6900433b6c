"""Nearest training genomes of contigs by their embeddings, and the lineage rank that their similarity supports.

An index holds the embeddings of some 20,000 pieces of training genomes as int8, each with its genome's name and lineage. The
similarity is the cosine of the quantised vectors: for 64 numbers it is off by about 0.001. Dot products of int8 vectors of up to
1,024 numbers are exact in fp32, so the result depends neither on the machine nor on the size of blocks.

Sources: Gonzalez (1985), "Clustering to minimize the maximum intercluster distance", Theoretical Computer Science 38, 293-306,
for the choice of representatives; Wilson (1927), "Probable inference, the law of succession, and statistical inference",
Journal of the American Statistical Association 22, 209-212, for the lower limit of a precision.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.files import atomic_path, from_json, parse_object
from virnuc_core.plain_text import cell_text

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int8 = npt.NDArray[np.int8]
Int64 = npt.NDArray[np.int64]

# From the broadest to the deepest. A group is a genus or what comes near to one.
RANKS: Final = ("class", "family", "group")
UNKNOWN: Final = "unlike anything known"
# Scored chunks of a contig from which on its nearest genome is given; of fewer, even the class is often another.
LEAST_CHUNKS: Final = 3
# Share of contigs whose calls are not unsure for their novelty alone.
COVERAGE: Final = 0.8

_COLUMNS: Final = ("name", *RANKS)
_METADATA: Final = "virnuc.index"
_FORMAT: Final = 1
_LARGEST: Final = 127
_MAX_WIDTH: Final = 1 << 13
_MAX_HEADER_BYTES: Final = 1 << 16
_ROUNDING: Final = 1e-6
# One-sided limit of 90 %, in standard deviations.
_CONFIDENCE: Final = 1.28
# Vectors whose highest similarity is kept, so that most of a block is read only once.
_TILE: Final = 128
# Similarities in memory at once, 16 MB.
_BLOCK_VALUES: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Labels:
    """N labels as numbers: label i is values[codes[i]]; "" is unknown.

    Attributes:
        codes: int32 (N,).
        values: sorted, each once.
    """

    codes: npt.NDArray[np.int32]
    values: tuple[str, ...]

    @classmethod
    def of(cls, labels: Sequence[str]) -> "Labels":
        """Numbers the labels; raises ValueError for one that would do harm in a table, see `cell_text`."""
        values = tuple(sorted(set(labels)))
        if odd := [value for value in values if not _is_plain(value)]:
            raise ValueError(f"the label {odd[0]!r:.60} cannot be printed in a table")
        number = {value: code for code, value in enumerate(values)}
        return cls(np.array([number[label] for label in labels], np.int32), values)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str:
        return self.values[int(self.codes[row])]

    @property
    def is_known(self) -> Bool:
        """Bool (N,)."""
        return np.asarray(np.array([bool(value) for value in self.values])[self.codes])

    def equal(self, rows: Int64, others: Sequence[str]) -> Bool:
        """Whether the labels of the rows (Q,) are those of `others` (Q,)."""
        number = {value: code for code, value in enumerate(self.values)}
        return np.asarray(self.codes[rows] == np.array([number.get(other, -1) for other in others]))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The k nearest vectors of Q queries, the nearest first; of equal ones, that of the lowest row.

    Attributes:
        rows: int64 (Q, k) rows of the index.
        similarity: fp32 (Q, k) cosines, -1..1.
    """

    rows: Int64
    similarity: Float32

    @property
    def novelty(self) -> Float32:
        """1 - similarity to the nearest, fp32 (Q,), 0..2."""
        return np.asarray(1 - self.similarity[:, 0])


@dataclass(frozen=True, kw_only=True, slots=True)
class GenomeIndex:
    """Quantised embeddings of N pieces of genomes, with lineages.

    Attributes:
        codes: int8 (N, D), each a unit embedding up to a factor of its own.
        names: of the genomes.
        lineages: labels for each of `RANKS`.
        head: digest of the classifier head that the embeddings come from.
        cuts: for each of `RANKS`, ascending, the similarity from which on the nearest genome is of the same; None for a rank
            that no similarity supports. See `fit_cuts`.
        unsure_above: the novelty above which a call is unsure, None for no such limit. See `fit_unsure_above`.
    """

    codes: Int8
    names: Labels
    lineages: tuple[Labels, ...]
    head: str
    cuts: tuple[float | None, ...] = (None,) * len(RANKS)
    unsure_above: float | None = None

    @classmethod
    def build(
        cls, embeddings: Float32, names: Sequence[str], lineages: Mapping[str, Sequence[str]], head: str
    ) -> "GenomeIndex":
        """Quantises embeddings fp32 (N, D); `lineages` has N labels for each of `RANKS`, "" where unknown.

        Raises:
            ValueError: a vector is zero or not finite, or the numbers of vectors, names and labels differ.
        """
        columns = (names, *(lineages[rank] for rank in RANKS))
        if not len(embeddings) or any(len(column) != len(embeddings) for column in columns):
            raise ValueError(f"{len(embeddings)} vectors, and {[len(column) for column in columns]} labels")
        labels = tuple(map(Labels.of, columns))
        return cls(codes=quantise(embeddings), names=labels[0], lineages=labels[1:], head=head)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def figures(self) -> dict[str, Any]:
        """Its sizes and limits, for records of a training."""
        cuts = dict(zip(RANKS, self.cuts, strict=True))
        return {
            "pieces": len(self),
            "genomes": len(self.names.values),
            "cuts": cuts,
            "unsure_above": self.unsure_above,
        }

    def lineage(self, row: int) -> dict[str, str]:
        """The labels of a vector by rank."""
        return {rank: labels[row] for rank, labels in zip(RANKS, self.lineages, strict=True)}

    def search(self, embeddings: Float32, k: int = 1) -> Neighbours:
        """Finds the k nearest vectors, or all if there are fewer, of embeddings fp32 (Q, D), exactly.

        Beside the result it needs memory for an fp32 copy of the index and some megabytes.

        Raises:
            MismatchError: the embeddings are of another width.
            ValueError: one is zero or not finite, or k < 1.
        """
        if embeddings.ndim != 2 or embeddings.shape[1] != self.codes.shape[1]:
            raise MismatchError(
                f"the index holds embeddings of {self.codes.shape[1]} numbers, and these are of shape "
                f"{embeddings.shape}. Use the index that belongs to the classifier head."
            )
        if k < 1:
            raise ValueError(f"k is {k}")
        k = min(k, len(self))
        vectors, scales = self._padded()
        rows = np.empty((len(embeddings), k), np.int64)
        similarity = np.empty((len(embeddings), k), np.float32)
        block = max(1, _BLOCK_VALUES // len(scales))
        for begin in range(0, len(embeddings), block):
            own = slice(begin, begin + block)
            queries = quantise(embeddings[own]).astype(np.float32)
            scores = queries @ vectors.T
            scores *= scales
            scores[:, len(self) :] = -np.inf
            rows[own], found = _top(scores, k)
            similarity[own] = np.clip(found * _inverse_norms(queries)[:, None], -1, 1)
        return Neighbours(rows, similarity)

    def supported_ranks(self, neighbours: Neighbours) -> Int8:
        """Index into `RANKS`, int8 (Q,), of the deepest rank that each nearest similarity supports; -1 for `UNKNOWN`.

        Ranks of which the nearest vector has no label are passed over; without fitted cuts, nothing is supported.
        """
        depth = np.full(len(neighbours.rows), -1, np.int8)
        for rank, (labels, cut) in enumerate(zip(self.lineages, self.cuts, strict=True)):
            if cut is not None:
                depth[(neighbours.similarity[:, 0] >= cut) & labels.is_known[neighbours.rows[:, 0]]] = rank
        return depth

    def describe(self, neighbours: Neighbours) -> tuple[list[str], list[str | None]]:
        """Name of the nearest genome of each query, and its label of the deepest supported rank.

        Where no rank is supported, the name is `UNKNOWN` and there is no label. An index without any fitted cut does not know
        what is far: it gives all names, and no labels.
        """
        nearest, depth = neighbours.rows[:, 0].tolist(), self.supported_ranks(neighbours).tolist()
        has_cuts = any(cut is not None for cut in self.cuts)
        names = [
            UNKNOWN if has_cuts and rank < 0 else self.names[row]
            for row, rank in zip(nearest, depth, strict=True)
        ]
        labels = [
            None if rank < 0 else self.lineages[rank][row] for row, rank in zip(nearest, depth, strict=True)
        ]
        return names, labels

    def _padded(self) -> tuple[Float32, Float32]:
        """The vectors and their inverse norms, with zeros up to a multiple of the tile."""
        padding = -len(self) % _TILE
        vectors = np.pad(self.codes.astype(np.float32), ((0, padding), (0, 0)))
        return vectors, np.pad(_inverse_norms(vectors[: len(self)]), (0, padding))


def quantise(embeddings: Float32) -> Int8:
    """Scales each vector (N, D) so that its largest number is 127 or -127, and rounds it to int8 (N, D).

    Raises:
        ValueError: a vector is zero or not finite, or there are more than 8,192 numbers in one.
    """
    if embeddings.shape[1] > _MAX_WIDTH:
        raise ValueError(f"vectors of {embeddings.shape[1]} numbers are too wide")
    largest = np.abs(embeddings).max(1, initial=0, keepdims=True)
    if not (np.isfinite(largest) & (largest > 0)).all():
        raise ValueError("an embedding is zero or not finite")
    return np.asarray(np.rint(embeddings / largest * np.float32(_LARGEST)).astype(np.int8))


def _inverse_norms(codes: Float32) -> Float32:
    """1 / norm, fp32 (N,), of vectors of integers (N, D)."""
    return np.asarray(1 / np.sqrt(np.square(codes).sum(1)))


def _top(scores: Float32, k: int) -> tuple[Int64, Float32]:
    """Columns and values (Q, k) of the highest scores (Q, tiles * _TILE), which it overwrites; the first of equal ones first."""
    line = np.arange(len(scores))
    tiles = scores.reshape(len(scores), -1, _TILE)
    tops = tiles.max(2)
    columns = np.empty((len(scores), k), np.int64)
    values = np.empty((len(scores), k), np.float32)
    for place in range(k):
        tile = tops.argmax(1)
        own = tiles[line, tile]
        column = own.argmax(1)
        columns[:, place], values[:, place] = tile * _TILE + column, own[line, column]
        own[line, column] = tiles[line, tile, column] = -np.inf
        tops[line, tile] = own.max(1)
    return columns, values


def choose_representatives(
    embeddings: Float32, groups: Int64, per_group: int, tolerance: float = 0.0
) -> Int64:
    """Rows, int64 ascending, of at most `per_group` embeddings (N, D) of each group (N,), spread as far as possible.

    The first is the one nearest to the mean of its group, then always the one farthest from those chosen already, until all are
    within `tolerance` (1 - cosine) of one.

    Raises:
        ValueError: a vector is zero or not finite, or per_group < 1.
    """
    if per_group < 1:
        raise ValueError(f"per_group is {per_group}")
    codes = quantise(embeddings)
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    chosen = [
        rows[_farthest_first(codes[rows].astype(np.float32), per_group, tolerance)]
        for rows in members
        if len(rows)
    ]
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def fit_cuts(
    index: GenomeIndex, neighbours: Neighbours, lineages: Mapping[str, Sequence[str]], precision: float
) -> GenomeIndex:
    """Returns the index with cuts fitted on Q held-out queries of known lineage.

    The cut of a rank is the lowest similarity such that, of the queries whose nearest vector is at least as similar, a share of
    `precision` have the label of that vector; the lower 90 % limit of the share counts (Wilson), so that few queries support no
    rank. Queries without a label, or whose nearest vector has none, do not count. A similarity that supports a rank supports
    all above it.

    The precision holds for queries like these: a part of them must be of groups and families that the index lacks. Take one or
    few queries of each genome, because those of one genome agree with each other.

    Args:
        index: without the genomes of the queries.
        neighbours: of the queries in that index.
        lineages: Q labels for each of `RANKS`, "" where unknown.
        precision: wanted, between 0 and 1.

    Raises:
        ValueError: the precision is out of range.
    """
    if not 0 < precision < 1:
        raise ValueError(f"the precision is {precision}, and must be between 0 and 1")
    nearest = neighbours.rows[:, 0]
    cuts: list[float | None] = []
    for rank, labels in zip(RANKS, index.lineages, strict=True):
        counts = labels.is_known[nearest] & np.array([bool(label) for label in lineages[rank]], np.bool_)
        is_same = labels.equal(nearest, lineages[rank])
        cuts.append(_lowest_cut(neighbours.similarity[counts, 0], is_same[counts], precision))
    supported = (
        min((cut for cut in cuts[depth:] if cut is not None), default=None) for depth in range(len(cuts))
    )
    return replace(index, cuts=tuple(supported))


def fit_unsure_above(novelty: Float32, coverage: float = COVERAGE) -> float | None:
    """The novelty that a share of at most 1 - `coverage` of held-out contigs (n,) exceed, as near to it as possible.

    None without any contig.
    """
    return float(np.quantile(novelty, coverage, method="inverted_cdf")) if len(novelty) else None


def errors_by_novelty(novelty: Float32, is_wrong: Bool, coverage: float = COVERAGE) -> float:
    """Share of wrong calls among the least novel of n contigs, a share of `coverage`, over the share among all of them.

    Below 1, novel contigs are called wrongly more often than others. Equally novel contigs at the limit count in part, each
    alike. NaN without a wrong call.
    """
    levels, level = np.unique(novelty, return_inverse=True)
    counts = np.bincount(level, minlength=len(levels))
    wrong = np.bincount(level, is_wrong, len(levels))
    covered = coverage * len(novelty)
    taken = np.clip(covered - (np.cumsum(counts) - counts), 0, counts)
    total = wrong.sum()
    return float((taken / counts * wrong).sum() / covered / (total / len(novelty))) if total else np.nan


def _lowest_cut(similarity: Float32, is_same: Bool, precision: float) -> float | None:
    order = np.argsort(-similarity, kind="stable")
    count = np.arange(1, len(order) + 1)
    limit = _wilson_limit(np.cumsum(is_same[order]), count)
    # Equal similarities cannot be parted.
    is_end = np.append(np.diff(similarity[order]) != 0, True)[: len(order)]
    fits = np.flatnonzero(is_end & (limit >= precision))
    return float(similarity[order[fits[-1]]]) if len(fits) else None


def _wilson_limit(hits: Int64, count: Int64) -> Float64:
    """Lower limit of the shares hits / count, float64 (n,)."""
    share, spread = hits / count, _CONFIDENCE**2 / count
    margin = np.sqrt(spread * (share * (1 - share) + spread / 4))
    return np.asarray((share + spread / 2 - margin) / (1 + spread))


def _farthest_first(vectors: Float32, most: int, tolerance: float) -> Int64:
    """Rows of vectors of integers (n, D) in the order in which they are chosen."""
    scales = _inverse_norms(vectors)
    # Sums of whole numbers, so that no rounding decides between vectors.
    mean = np.rint(vectors.sum(0, dtype=np.float64) / len(vectors)).astype(np.float32)
    chosen = [int((vectors @ mean * scales).argmax())]
    nearest = np.full(len(vectors), -np.inf, np.float32)
    while len(chosen) < min(most, len(vectors)):
        newest = chosen[-1]
        nearest = np.maximum(nearest, vectors @ vectors[newest] * scales * scales[newest])
        # A vector is its own nearest, whatever rounding says.
        nearest[newest] = np.inf
        if nearest.min() >= 1 - tolerance - _ROUNDING:
            break
        chosen.append(int(nearest.argmin()))
    return np.array(chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What the metadata of a file hold; sha256 is that of the tensors and of the other fields."""

    format: int
    head: str
    cuts: tuple[float | None, ...]
    sha256: str
    unsure_above: float | None = None

    def require_valid(self) -> None:
        """Raises ValueError for limits that no index has."""
        cuts = [cut for cut in self.cuts if cut is not None]
        if len(self.cuts) != len(RANKS) or cuts != sorted(cuts):
            raise ValueError(f"its cuts are {self.cuts}")
        if self.unsure_above is not None and not 0 <= self.unsure_above <= 2:
            raise ValueError(f"its limit of novelty is {self.unsure_above}")


def save_index(index: GenomeIndex, path: Path) -> None:
    """Writes an index as safetensors, atomically and reproducibly."""
    tensors: dict[str, npt.NDArray[Any]] = {"vectors": np.ascontiguousarray(index.codes)}
    for name, labels in zip(_COLUMNS, (index.names, *index.lineages), strict=True):
        values = ByteColumn.from_strings(labels.values)
        tensors |= {
            f"{name}.codes": labels.codes,
            f"{name}.offsets": values.offsets,
            f"{name}.data": values.data,
        }
    facts = _Facts(
        format=_FORMAT,
        head=index.head,
        cuts=index.cuts,
        unsure_above=index.unsure_above,
        sha256="",
    )
    facts = replace(facts, sha256=_digest(facts, tensors))
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {_METADATA: json.dumps(asdict(facts), sort_keys=True)})


def load_index(path: Path, head: str | None = None) -> GenomeIndex:
    """Reads an index and checks all of it; `head` is the digest of the head whose embeddings are to be looked up.

    Raises:
        CheckpointError: the file is missing or damaged, or is no index.
        MismatchError: the index is of another head.
    """
    try:
        facts, tensors = _read(path)
        index = _checked_index(facts, tensors)
    except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not an index of genomes: {error}. It may be truncated: fetch it again, or build it again."
        ) from error
    if head is not None and head != index.head:
        raise MismatchError(
            f"{path} was built with another classifier head than the one in use. Give the index of this head, or build it again."
        )
    return index


def _read(path: Path) -> tuple[_Facts, dict[str, npt.NDArray[Any]]]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"it declares a header of {header_bytes:,} bytes")
    with safe_open(path, framework="numpy") as file:
        facts = from_json(_Facts, parse_object((file.metadata() or {})[_METADATA]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if facts.format != _FORMAT:
        raise ValueError(f"its format is {facts.format} and not {_FORMAT}")
    if facts.sha256 != _digest(facts, tensors):
        raise ValueError("its checksum is wrong")
    return facts, tensors


def _checked_index(facts: _Facts, tensors: Mapping[str, npt.NDArray[Any]]) -> GenomeIndex:
    vectors = tensors["vectors"]
    if vectors.dtype != np.int8 or vectors.ndim != 2 or not 0 < vectors.shape[1] <= _MAX_WIDTH:
        raise ValueError(f"its vectors are {vectors.dtype} of shape {vectors.shape}")
    if not len(vectors) or (np.abs(vectors.astype(np.int16)).max(1) != _LARGEST).any():
        raise ValueError("a vector is not scaled as it should be")
    labels = tuple(_checked_labels(name, tensors, len(vectors)) for name in _COLUMNS)
    facts.require_valid()
    return GenomeIndex(
        codes=vectors,
        names=labels[0],
        lineages=labels[1:],
        head=facts.head,
        cuts=facts.cuts,
        unsure_above=facts.unsure_above,
    )


def _checked_labels(name: str, tensors: Mapping[str, npt.NDArray[Any]], count: int) -> Labels:
    codes, offsets, data = (tensors[f"{name}.{part}"] for part in ("codes", "offsets", "data"))
    kinds = [f"{array.dtype} {array.ndim}" for array in (codes, offsets, data)]
    if kinds != ["int32 1", "int64 1", "uint8 1"] or len(codes) != count or len(offsets) < 2:
        raise ValueError(f"its {name} labels are of other types or sizes")
    if offsets[0] != 0 or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
        raise ValueError(f"its {name} labels overlap")
    if codes.min() < 0 or codes.max() >= len(offsets) - 1:
        raise ValueError(f"its {name} labels are not all there")
    values = tuple(ByteColumn(data, offsets).to_strings())
    if not all(map(_is_plain, values)):
        raise ValueError(f"its {name} labels cannot be printed in a table")
    return Labels(codes, values)


def _is_plain(label: str) -> bool:
    return label.isprintable() and cell_text(label) == label


def _digest(facts: _Facts, tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 over the metadata, and names, shapes and content of the tensors."""
    stated = asdict(replace(facts, sha256=""))
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
