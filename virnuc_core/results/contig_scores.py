"""Scores of chunks and contigs from the codes of their rows, by a head for the longest stop-free stretches.

Shape legend: N rows, C chunks, S chunks with a row, R contigs, Z width of a code, K classes.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virnuc_core.errors import CheckpointError
from virnuc_core.inference.plan import RunPlan
from virnuc_core.inference.runner import load_planned_head
from virnuc_core.models.contig_head import ContigHead
from virnuc_core.models.heads import fixed_threads
from virnuc_core.models.tensor_files import is_finite
from virnuc_core.results.calls import ContigScores
from virnuc_core.specs import CODE_WIDTH

# Blocks of contigs are scored in parallel, which takes less than threads that share each small product.
SCORING_THREADS: Final = 1
_BLOCK_CHUNKS: Final = 1 << 13

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
        novelty = head.novelty(embedding).double().numpy()
    size = len(chunk_contig)
    return ContigScores(
        p_chunk=_spread(p_chunk, chunk_numbers, size, np.nan),
        p_context=_spread(p_context, chunk_numbers, size, np.nan),
        p_contig=np.where(counts > 0, p_contig, np.nan),
        chunk_classes=_spread(_best_classes(head, logits), chunk_numbers, size, -1),
        contig_classes=np.where(counts[:, None] > 0, _best_classes(head, contig_logits), -1),
        embedding=np.where(counts[:, None] > 0, embedding.numpy(), np.float32(np.nan)),
        novelty=np.where(counts > 0, novelty, np.nan),
        is_novel=(counts > 0) & (novelty > float(head.novelty_limit)),
    )


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
