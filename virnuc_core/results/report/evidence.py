"""Why contigs were called: evidence and class of each of their chunks, and the stretches that these were scored from."""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.errors import DamagedFileError
from virnuc_core.results.calls import OCCLUSIONS, VIRUS
from virnuc_core.results.embeddings import IDS, SCORES, SIZES, STARTS, Embeddings
from virnuc_core.sequences.frames import FRAME_NAMES

# Of predictions.parquet.
EVIDENCE_COLUMNS: Final = ("contig", "chunk", "p_virus", "call", "class", "evidence")
NO_CLASS: Final = 255
_FRAMES: Final = [name.encode() for name in FRAME_NAMES]
_FRAME_LETTERS: Final = len(FRAME_NAMES[0])
_BLOCK_ROWS: Final = 1 << 14

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkEvidence:
    """Of n chunks, s of which have a score.

    Attributes:
        evidence: fp32 (n,), NaN without a score.
        classes: of the chunks, None without a score.
        viral_classes: those of chunks that are called virus.
        numbers: (s,) of the chunks that have a score, among all of the run that have one.
        ids: of these, see `FrameStore.chunk_ids`.
    """

    evidence: npt.NDArray[np.float32]
    classes: list[str | None]
    viral_classes: set[str]
    numbers: Int64
    ids: list[str]

    def document(self, names: Sequence[str], embeddings: Path) -> dict[str, Any]:
        """As JSON values, arrays as base64 of little-endian numbers; `names` are those that classes are numbered by.

        Without the embeddings file it has no stretches.

        Raises:
            DamagedFileError: the file cannot be read, or is of another run.
        """
        number = {name: place for place, name in enumerate(names)}
        is_scored = np.array([name is not None for name in self.classes], np.bool_)
        document: dict[str, Any] = {
            "values": _packed(self.evidence, "<f4"),
            "classes": _packed([NO_CLASS if name is None else number[name] for name in self.classes], "u1"),
            "occlusions": OCCLUSIONS,
            "stretches": None,
        }
        if embeddings.exists():
            stretches = read_stretches(embeddings, self.numbers, self.ids)
            counts = np.zeros(len(is_scored), np.int64)
            counts[is_scored] = stretches.counts
            document["stretches"] = {
                "counts": _packed(counts, "u1"),
                "frames": _packed(stretches.frames, "u1"),
                "starts": _packed(stretches.starts, "<u4"),
                "bases": _packed(stretches.bases, "<u4"),
                "p_virus": _packed(stretches.p_virus, "<f4"),
            }
        return document


def read_evidence(batches: Iterable[pa.RecordBatch], contigs: Iterable[int]) -> ChunkEvidence:
    """Reads the chunks of some contigs from all batches of a table of chunks; contigs are numbers of their rows, from 0."""
    wanted = np.sort(np.array(list(contigs), np.int64))
    evidence, numbers = [np.empty(0, np.float32)], [np.empty(0, np.int64)]
    classes: list[str | None] = []
    viral_classes: set[str] = set()
    ids: list[str] = []
    contig = number = -1
    for batch in batches:
        contig_of = contig + np.cumsum(batch["chunk"].to_numpy() == 1)
        is_scored = np.asarray(batch["p_virus"].is_valid())
        number_of = number + np.cumsum(is_scored)
        contig, number = int(contig_of[-1]), int(number_of[-1])
        if not (is_own := is_among(contig_of, wanted)).any():
            continue
        own = batch.filter(pa.array(is_own))
        evidence.append(own["evidence"].to_numpy(zero_copy_only=False).astype(np.float32))
        numbers.append(number_of[is_own & is_scored])
        classes += own["class"].to_pylist()
        viral_classes.update(own.filter(pc.equal(own["call"], VIRUS))["class"].unique().to_pylist())
        names = own.filter(own["p_virus"].is_valid()).select(["contig", "chunk"]).to_pylist()
        ids += [f"{name['contig']}_chunk_{name['chunk']}" for name in names]
    return ChunkEvidence(np.concatenate(evidence), classes, viral_classes, np.concatenate(numbers), ids)


@dataclass(frozen=True, slots=True)
class Stretches:
    """m stretches of n chunks, in the order of the chunks.

    Attributes:
        counts: (n,) stretches of each chunk.
        frames: (m,) index into FRAME_NAMES.
        starts: (m,) first base, from 0, on its strand of the chunk.
        bases: (m,) length.
        p_virus: (m,) score of the stretch alone.
    """

    counts: Int64
    frames: Int64
    starts: Int64
    bases: Int64
    p_virus: npt.NDArray[np.float64]


def read_stretches(path: Path, numbers: Int64, ids: Sequence[str]) -> Stretches:
    """Reads the rows of n chunks from an embeddings file; all ids are read up to the last of these chunks, in blocks.

    Args:
        path: of a run over the longest stretches.
        numbers: (n,) of the chunks among those that have a row, from 0, ascending.
        ids: what the ids of each chunk's rows begin with, see `FrameStore.chunk_ids`.

    Raises:
        DamagedFileError: the file cannot be read, or has other rows.
    """
    names: list[bytes] = []
    parts: list[npt.NDArray[np.float64]] = [np.empty((0, 4))]
    with Embeddings(path, own=True) as file:
        for first, number, block in _numbered_ids(file):
            if not len(numbers) or number[0] > numbers[-1]:
                break
            is_wanted = is_among(number, numbers)
            if is_wanted.any():
                names += block[is_wanted].tolist()
                starts, sizes, scores = (
                    file.rows(name, first, first + len(block))[is_wanted] for name in (STARTS, SIZES, SCORES)
                )
                place = np.searchsorted(numbers, number[is_wanted])
                parts.append(np.column_stack((place, starts, 3 * sizes[:, 0], scores[:, 1])))
    place, starts, bases, p_virus = np.concatenate(parts).T
    counts = np.bincount(place.astype(np.int64), minlength=len(numbers))
    expected = (ids[chunk].encode() for chunk in place.astype(np.int64).tolist())
    if not counts.all() or any(
        name[:-_FRAME_LETTERS] != own or name[-_FRAME_LETTERS:] not in _FRAMES
        for name, own in zip(names, expected, strict=True)
    ):
        raise DamagedFileError(
            f"{path} has other rows than the tables of its run: run the same command again."
        )
    return Stretches(
        counts=counts,
        frames=np.array([_FRAMES.index(name[-_FRAME_LETTERS:]) for name in names], np.int64),
        starts=starts.astype(np.int64),
        bases=bases.astype(np.int64),
        p_virus=p_virus,
    )


def is_among(values: Int64, ascending: Int64) -> npt.NDArray[np.bool_]:
    """Which of the values (n,), at least 0, are among others that ascend."""
    return np.asarray(np.append(ascending, -1)[np.searchsorted(ascending, values)] == values)


def _numbered_ids(file: Embeddings) -> Iterator[tuple[int, Int64, npt.NDArray[np.bytes_]]]:
    """Blocks of rows: number of the first, number of each row's chunk among those with a row, and ids."""
    number, last = -1, b""
    for first in range(0, len(file), _BLOCK_ROWS):
        ids = file.rows(IDS["predict"], first, first + _BLOCK_ROWS)
        letters = ids.view(np.uint8).reshape(len(ids), -1).copy()
        last_letters = np.strings.str_len(ids)[:, None] - np.arange(1, _FRAME_LETTERS + 1)
        np.put_along_axis(letters, last_letters, 0, axis=1)
        chunks = letters.view(ids.dtype).ravel()
        is_new = np.append(chunks[0] != last, chunks[1:] != chunks[:-1])
        numbers = number + np.cumsum(is_new)
        number, last = int(numbers[-1]), chunks[-1]
        yield first, numbers, ids


def _packed(numbers: npt.ArrayLike, dtype: str) -> str:
    return b64encode(np.asarray(numbers).astype(dtype).tobytes()).decode()
