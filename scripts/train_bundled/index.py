"""The index of the training genomes by the embeddings of a trained network."""

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
from virnuc_core.results.nearest import GenomeIndex
from virnuc_core.training.genome_index import LabelledPieces, build_index

# Lengths of pieces and of the chunks that they are cut into: a short contig is nearest to short pieces.
_PIECES: Final = ((5000, 2000), (500, 500))
_MOST_OF_GENOME: Final = 4  # pieces of each length

Int64 = npt.NDArray[np.int64]


def index_genomes(
    network: Network, train: Genomes, held_out: Genomes, tokenizer: DnabertTokenizer, seed: int
) -> GenomeIndex:
    """The index, of no head yet; its limits are fitted on the held-out genomes."""
    own, others = (embed_genomes(network, genomes, tokenizer) for genomes in (train, held_out))
    return build_index(own, others, "", seed)


@torch.inference_mode()
def embed_genomes(network: Network, genomes: Genomes, tokenizer: DnabertTokenizer) -> LabelledPieces:
    """A few pieces of each genome, of each length; names are organisms."""
    embeddings, genome, num_chunks = [], [], []
    for length, chunk_length in _PIECES:
        record, bases = _spread_pieces(genomes.bases, length)
        chunks = cut(genomes.of(record, bases), View(chunk_length=chunk_length), tokenizer)
        place = to_device(chunks.record, network.head.gate.weight.device)
        found = network.head.contigs(chunk_codes(network, chunks), place, len(record)).embedding
        with_chunks, counts = np.unique(chunks.record, return_counts=True)
        embeddings.append(found.cpu().numpy()[with_chunks])
        genome.append(record[with_chunks])
        num_chunks.append(counts)
    return LabelledPieces(
        embeddings=np.concatenate(embeddings),
        genome=np.concatenate(genome),
        num_chunks=np.concatenate(num_chunks),
        names=genomes.organisms,
        lineages=genomes.lineages,
        groups=genomes.groups,
    )


def _spread_pieces(bases: ByteColumn, length: int) -> tuple[Int64, ByteColumn]:
    """Up to `_MOST_OF_GENOME` pieces of each genome, evenly spread; a shorter genome is one piece. Also gives their genomes."""
    counts = np.clip(bases.lengths // length, 1, _MOST_OF_GENOME)
    record = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    room = np.maximum(0, bases.lengths - length)[record]
    starts = bases.offsets[record] + room * place // np.maximum(1, counts[record] - 1)
    index, offsets = concatenated_ranges(starts, np.minimum(length, bases.lengths[record]))
    return record, ByteColumn(bases.data[index], offsets)
