"""DNABERT-S token ids by the byte-pair encoding of its `tokenizer.json`."""

from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from virnuc_core.batching.packed_batch import TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError

# Encodings hold far more than ids (about 0.5 kB a token), so they are made and dropped block by block. They
# become Python objects at a stroke, in which no other thread runs: 1 ms for a block of this size.
_BLOCK_BASES: Final = 1 << 18


class DnabertTokenizer:
    """DNA letters to DNABERT-S ids: [CLS], byte pairs, [SEP]; ids are those of the file.

    The truncation and padding that published files carry are switched off. Letters without an entry in
    the vocabulary (lower case, IUPAC codes) become one [UNK] each.

    Attributes:
        vocab_size: entries of the vocabulary, added tokens included.
    """

    def __init__(self, path: Path) -> None:
        """Reads a tokenizer file.

        Args:
            path: a `tokenizer.json` of the tokenizers library.

        Raises:
            CheckpointError: the file is missing or damaged, or adds no [CLS] and [SEP].
        """
        self._tokenizer = _read(path)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, sequences: ByteColumn) -> TokenColumn:
        """Tokenizes n sequences, whatever their length.

        Args:
            sequences: n strings of upper-case nucleotide letters.

        Returns:
            n rows of token ids.
        """
        blocks: list[npt.NDArray[np.int32]] = []
        offsets = np.zeros(len(sequences) + 1, np.int64)
        begin = 0
        while begin < len(sequences):
            limit = sequences.offsets[begin] + _BLOCK_BASES
            end = max(begin + 1, int(np.searchsorted(sequences.offsets, limit, side="right")) - 1)
            encodings = self._tokenizer.encode_batch_fast(sequences.rows(begin, end).to_strings())
            ids = [encoding.ids for encoding in encodings]
            offsets[begin + 1 : end + 1] = [len(row) for row in ids]
            blocks.append(np.fromiter(chain.from_iterable(ids), np.int32))
            begin = end
        np.cumsum(offsets, out=offsets)
        return TokenColumn(np.concatenate(blocks) if blocks else np.empty(0, np.int32), offsets)


def _read(path: Path) -> Tokenizer:
    """The tokenizer of a file, without truncation and padding, proven to add [CLS] and [SEP]."""
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer {path} cannot be read ({error}). Put the model's own tokenizer.json there."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    specials = [tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")]
    if tokenizer.encode("").ids != specials:
        raise CheckpointError(
            f"tokenizer {path} does not put [CLS] before and [SEP] after a sequence, so it is not the one "
            "of a DNABERT-S model. Put the model's own tokenizer.json there."
        )
    return tokenizer
