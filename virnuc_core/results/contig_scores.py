"""Scores of chunks and contigs from the codes of their rows, by a head for the longest stop-free stretches.

Shape legend: N rows, C chunks, S chunks with a row, R contigs, Z width of a code, K classes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.columns import concatenated_ranges
from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.files import file_digest
from virnuc_core.inference.plan import RunPlan
from virnuc_core.inference.runner import load_planned_head
from virnuc_core.models.catalogue import index_path
from virnuc_core.models.contig_head import ContigHead
from virnuc_core.models.heads import fixed_threads
from virnuc_core.models.tensor_files import is_finite
from virnuc_core.results.calls import OCCLUSIONS, ContigScores
from virnuc_core.results.nearest import GenomeIndex, load_index
from virnuc_core.specs import CODE_WIDTH

# Blocks of contigs are scored in parallel, which takes less than threads that share each small product.
SCORING_THREADS: Final = 1
_BLOCK_CHUNKS: Final = 1 << 13

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


def contig_head_of(plan: RunPlan) -> ContigHead | None:
    """The head of a run over the longest stretches, None for another run.

    Raises:
        CheckpointError: it cannot be read.
        MismatchError: it has changed since planning.
    """
    if plan.head is None or plan.frames == "open":
        return None
    head = load_planned_head(plan.head)
    assert isinstance(head, ContigHead)
    return head


def genome_index_of(plan: RunPlan) -> GenomeIndex | None:
    """The index of training genomes of a run's head, None for a run without one.

    Raises:
        CheckpointError: it is missing or damaged.
        MismatchError: it has changed since planning, or is of another head.
    """
    if plan.head is None or plan.head.index is None:
        return None
    path = index_path(Path(plan.head.location))
    if not path.is_file():
        raise CheckpointError(
            f"the index of head {plan.head.name} ({path}) is not there any more: put it back."
        )
    if (found := file_digest(path)) != plan.head.index:
        raise MismatchError(
            f"the index of head {plan.head.name} ({path}) has changed since the run was planned: SHA-256 "
            f"{plan.head.index[:12]}, now {found[:12]}. Put the old one back, or start over with --force."
        )
    return load_index(path, plan.head.fingerprint)


@torch.inference_mode()
def score_contigs(
    head: ContigHead,
    read_codes: Callable[[int, int], npt.NDArray[np.float16]],
    row_chunk: Int64,
    chunk_contig: Int64,
    num_contigs: int,
) -> ContigScores:
    """Scores C chunks and R whole contigs.

    Codes are read in blocks; apart from arguments and result, this takes less than 1 kB a chunk.

    Args:
        head: in evaluation mode.
        read_codes: gives the codes, fp16 (n, Z), of the rows begin..end-1 of the N rows.
        row_chunk: (N,) chunk of each row, ascending from 0.
        chunk_contig: (C,) contig of each chunk, ascending from 0.
        num_contigs: R.

    Raises:
        CheckpointError: a score is not finite.
    """
    starts = np.flatnonzero(np.diff(row_chunk, prepend=-1))
    chunk_numbers = row_chunk[starts]
    contig = chunk_contig[chunk_numbers]
    counts = np.bincount(contig, minlength=num_contigs)
    num_classes = len(head.spec.classes)
    codes = torch.empty((len(contig), CODE_WIDTH))
    logits, context = torch.empty((2, len(contig), num_classes))
    contig_logits = torch.zeros((num_contigs, num_classes))
    embedding = torch.zeros((num_contigs, CODE_WIDTH))
    with fixed_threads(SCORING_THREADS):
        for begin, end, first, last in _blocks(starts, len(row_chunk)):
            number = np.cumsum(np.diff(row_chunk[first:last], prepend=row_chunk[first]) > 0)
            rows = torch.from_numpy(read_codes(first, last)).float()
            codes[begin:end] = head.chunk_codes(rows, torch.from_numpy(number), end - begin)
            logits[begin:end] = head.chunk(codes[begin:end])
        if len(contig):
            found = head.contigs(codes, torch.from_numpy(contig), num_contigs)
            context, contig_logits, embedding = found.context, found.logits, found.embedding
        scored = torch.from_numpy(counts > 0)
        if not all(map(is_finite, (logits, context, contig_logits[scored], embedding[scored]))):
            raise CheckpointError(
                "the head gives scores that are not finite: its weights are broken, fetch it again."
            )
        p_contig = _probabilities(head.contig_margin(contig_logits, torch.from_numpy(counts)))
        p_chunk, p_context = map(_probabilities, (head.chunk_margin(logits), head.context_margin(context)))
    size = len(chunk_contig)
    return ContigScores(
        p_chunk=_spread(p_chunk, chunk_numbers, size, np.nan),
        p_context=_spread(p_context, chunk_numbers, size, np.nan),
        p_contig=np.where(counts > 0, p_contig, np.nan),
        chunk_classes=_spread(_best_classes(head, logits), chunk_numbers, size, -1),
        contig_classes=np.where(counts[:, None] > 0, _best_classes(head, contig_logits), -1),
        codes=codes.numpy(),
        embedding=np.where(counts[:, None] > 0, embedding.numpy(), np.float32(np.nan)),
    )


@torch.inference_mode()
def chunk_evidence(head: ContigHead, codes: Float32, contig: Int64, is_virus: Bool) -> Float64:
    """How much each chunk adds to the calibrated log-odds of a virus of its contig, (S,): what they lose when it is left out.

    The contig is then read as if the chunk had no row, but on the scale of all its chunks, since calibration by number of chunks
    is no evidence. Of more than `OCCLUSIONS` chunks, blocks are left out, and the chunks of a block share equally. A single
    chunk has all log-odds of its contig.

    Args:
        head: in evaluation mode.
        codes: (S, Z) of the chunks with a row.
        contig: (S,) of these chunks, ascending.
        is_virus: (R,) contigs that are called virus; the chunks of others get NaN.
    """
    evidence = np.full(len(contig), np.nan)
    chosen = np.flatnonzero(is_virus[contig])
    # Whole contigs, by their last chunks.
    group = np.searchsorted(contig[chosen], contig[chosen], side="right") // _BLOCK_CHUNKS
    with fixed_threads(SCORING_THREADS):
        for own in np.split(chosen, np.flatnonzero(np.diff(group)) + 1):
            if len(own):
                evidence[own] = _evidence(head, codes[own], contig[own])
    return evidence


def _evidence(head: ContigHead, codes: Float32, contig: Int64) -> Float64:
    """See `chunk_evidence`; all contigs are called virus, at least one."""
    _, number, counts = np.unique(contig, return_inverse=True, return_counts=True)
    own, num_chunks = torch.from_numpy(codes), torch.from_numpy(counts)
    logits = head.contigs(own, torch.from_numpy(number), len(counts)).logits
    whole = head.contig_margin(logits, num_chunks)
    evidence = whole.double().numpy()[number]
    several = np.flatnonzero(counts[number] > 1)
    if len(several):
        block, begin, end = _occluded_blocks(number, counts, several)
        owner = number[begin]
        stop = np.cumsum(counts)[owner]
        logits = _logits_without(head, own, np.stack((stop - counts[owner], begin, end, stop), axis=1))
        change = whole[owner] - head.contig_margin(logits, num_chunks[owner])
        evidence[several] = (change.double().numpy() / (end - begin))[block]
    return evidence


def _occluded_blocks(contig: Int64, counts: Int64, chosen: Int64) -> tuple[Int64, Int64, Int64]:
    """Block of each chosen chunk (n,), first chunk and end of each block; `contig` (S,) is ascending, of so many chunks (R,)."""
    place = chosen - np.searchsorted(contig, contig[chosen])
    within = place * np.minimum(counts, OCCLUSIONS)[contig[chosen]] // counts[contig[chosen]]
    is_first = (np.diff(within, prepend=-1) != 0) | (place == 0)
    block, begin = np.cumsum(is_first) - 1, chosen[is_first]
    return block, begin, begin + np.bincount(block)


def _logits_without(head: ContigHead, codes: Tensor, bounds: Int64) -> Tensor:
    """Logits (M, K) of the chunks first..begin-1 and end..stop-1 of a contig; `bounds` are first, begin, end, stop (M, 4)."""
    starts, lengths = bounds[:, [0, 2]], bounds[:, [1, 3]] - bounds[:, [0, 2]]
    batch = (np.cumsum(lengths.sum(1)) - 1) // _BLOCK_CHUNKS
    logits = []
    for own in np.split(np.arange(len(bounds)), np.flatnonzero(np.diff(batch)) + 1):
        chunks, _ = concatenated_ranges(starts[own].ravel(), lengths[own].ravel())
        number = np.repeat(np.arange(len(own)), lengths[own].sum(1))
        logits.append(head.contigs(codes[chunks], torch.from_numpy(number), len(own)).logits)
    return torch.cat(logits)


def _blocks(starts: Int64, num_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges (begin, end) of chunks with a row, and (first, last) of their rows; `starts` (S,) is the first row of each."""
    bounds = np.append(starts, num_rows)
    for begin in range(0, len(starts), _BLOCK_CHUNKS):
        end = min(begin + _BLOCK_CHUNKS, len(starts))
        yield begin, end, int(bounds[begin]), int(bounds[end])


def _probabilities(margin: Tensor) -> Float64:
    # torch's sigmoid rounds the last few values of an array differently.
    return np.asarray(np.exp(-np.logaddexp(0.0, -margin.double().numpy())))


def _best_classes(head: ContigHead, logits: Tensor) -> Int64:
    """int64 (n, 2): the class with the highest of the logits (n, K) among those that are no viruses, and among viruses."""
    virus, other = logits.tensor_split([head.spec.num_virus], dim=1)
    return np.asarray(torch.stack((other.argmax(1) + head.spec.num_virus, virus.argmax(1)), dim=1).numpy())


def _spread(values: npt.NDArray[Any], rows: Int64, size: int, missing: float) -> npt.NDArray[Any]:
    """(size, ...) with `values` (n, ...) in the given rows (n,) and `missing` in the others."""
    spread = np.full((size, *values.shape[1:]), missing, values.dtype)
    spread[rows] = values
    return spread
