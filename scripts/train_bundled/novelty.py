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
_PIECES: Final = ((5000, 1000), (500, 500))
_MOST_PIECES: Final = 8000  # of each length

Int64 = npt.NDArray[np.int64]


@torch.inference_mode()
def embed_genomes(
    network: Network,
    genomes: Genomes,
    weights: npt.NDArray[np.float64],
    tokenizer: DnabertTokenizer,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.float32], Int64]:
    """Embeddings (P, Z) of pieces of each length, of genomes drawn by weights (R,), and the genome of each (P,)."""
    embeddings, genome = [], []
    for length, chunk_length in _PIECES:
        record = np.sort(rng.choice(len(weights), _MOST_PIECES, p=weights))
        lengths = np.minimum(length, genomes.bases.lengths[record])
        room = genomes.bases.lengths[record] - lengths
        starts = genomes.bases.offsets[record] + rng.integers(0, room + 1)
        index, offsets = concatenated_ranges(starts, lengths)
        bases = ByteColumn(genomes.bases.data[index], offsets)
        chunks = cut(genomes.of(record, bases), View(chunk_length=chunk_length), tokenizer)
        place = to_device(chunks.record, network.head.gate.weight.device)
        found = network.head.contigs(chunk_codes(network, chunks), place, len(record)).embedding
        with_chunks = np.unique(chunks.record)
        embeddings.append(found.cpu().numpy()[with_chunks])
        genome.append(record[with_chunks])
    return np.concatenate(embeddings), np.concatenate(genome)
