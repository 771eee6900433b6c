"""Random sequences of given lengths, as text and as tokens."""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.batching.tokenizers import Esm2Tokenizer, TokenColumn
from virnuc_core.benchmark.settings import Lengths
from virnuc_core.columns import ByteColumn
from virnuc_core.specs import Family, ModelSpec

_ALPHABETS: Final[dict[Family, bytes]] = {"esm2": b"LAGVSERTIDPKQNFYMHWC", "dnabert_s": b"ACGT"}
# DNABERT-S: [CLS], [SEP], and the first id of DNA.
_CLS_ID, _SEP_ID, _FIRST_DNA_ID = 1, 2, 5
# Like UniRef's proteins: about 340 residues on average, clipped to what ESM-2 was trained on.
_LOG_MEAN, _LOG_SD, _SHORTEST, _LONGEST = 5.6, 0.7, 30, 1022


def draw_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """int64 (count,): residues or bases, or tokens for `tokens:N`."""
    if lengths.kind == "lognormal":
        drawn = rng.lognormal(_LOG_MEAN, _LOG_SD, count)
        return np.clip(drawn, _SHORTEST, _LONGEST).astype(np.int64)
    return np.full(count, lengths.value, np.int64)


def random_sequences(family: Family, lengths: npt.NDArray[np.int64], rng: np.random.Generator) -> ByteColumn:
    """Proteins of the 20 residues, or DNA, of the given lengths."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return ByteColumn(rng.choice(np.frombuffer(_ALPHABETS[family], np.uint8), int(offsets[-1])), offsets)


def random_tokens(
    spec: ModelSpec, num_tokens: npt.NDArray[np.int64], rng: np.random.Generator
) -> TokenColumn:
    """Random ids between the model's own first and last token."""
    offsets = np.concatenate(([0], np.cumsum(num_tokens)))
    if spec.family == "esm2":
        first, last, low = Esm2Tokenizer.bos_id, Esm2Tokenizer.eos_id, Esm2Tokenizer.first_residue_id
        high = low + len(_ALPHABETS["esm2"])
    else:
        first, last, low, high = _CLS_ID, _SEP_ID, _FIRST_DNA_ID, spec.vocab_size
    input_ids = rng.integers(low, high, int(offsets[-1]), np.int32)
    input_ids[offsets[:-1]] = first
    input_ids[offsets[1:] - 1] = last
    return TokenColumn(input_ids, offsets)


def write_fasta(path: Path, sequences: ByteColumn) -> None:
    """Writes sequences under the names s0, s1, ..."""
    with path.open("w") as file:
        file.writelines(f">s{number}\n{text}\n" for number, text in enumerate(sequences.to_strings()))
