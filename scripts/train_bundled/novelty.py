"""Embeddings of pieces of genomes, which the novelty of contigs is measured by."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from scripts.train_bundled.data import View, cut
from scripts.train_bundled.evaluation import chunk_codes
from scripts.train_bundled.genomes import Genomes
from scripts.train_bundled.network import Network
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.columns import ByteColumn, concatenated_ranges
from virnuc_core.models.memory import to_device

# Lengths of pieces and of the chunks that they are cut into: a short contig is nearest to short pieces.
_PIECES: Final = ((5000, 2000), (500, 500))
_MOST_OF_GENOME: Final = 4  # pieces of each length

Int64 = npt.NDArray[np.int64]


@torch.inference_mode()
def embed_genomes(
    network: Network, genomes: Genomes, tokenizer: DnabertTokenizer
) -> tuple[npt.NDArray[np.float32], Int64]:
    """Embeddings (P, Z) of a few pieces of each genome, of each length, and the genome of each (P,)."""
    embeddings, genome = [], []
    for length, chunk_length in _PIECES:
        record, bases = _spread_pieces(genomes.bases, length)
        chunks = cut(genomes.of(record, bases), View(chunk_length=chunk_length), tokenizer)
        place = to_device(chunks.record, network.head.gate.weight.device)
        found = network.head.contigs(chunk_codes(network, chunks), place, len(record)).embedding
        with_chunks = np.unique(chunks.record)
        embeddings.append(found.cpu().numpy()[with_chunks])
        genome.append(record[with_chunks])
    return np.concatenate(embeddings), np.concatenate(genome)


def _spread_pieces(bases: ByteColumn, length: int) -> tuple[Int64, ByteColumn]:
    """Up to `_MOST_OF_GENOME` pieces of each genome, evenly spread; a shorter genome is one piece. Also gives their genomes."""
    counts = np.clip(bases.lengths // length, 1, _MOST_OF_GENOME)
    record = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    room = np.maximum(0, bases.lengths - length)[record]
    starts = bases.offsets[record] + room * place // np.maximum(1, counts[record] - 1)
    index, offsets = concatenated_ranges(starts, np.minimum(length, bases.lengths[record]))
    return record, ByteColumn(bases.data[index], offsets)
