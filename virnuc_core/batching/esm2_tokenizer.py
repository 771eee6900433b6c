"""ESM-2 token ids by a 256-entry byte table."""

from typing import Final

import numpy as np
import numpy.typing as npt

from virnuc_core.batching.packed_batch import TokenColumn
from virnuc_core.columns import ByteColumn

BOS_ID: Final = 0
PAD_ID: Final = 1
EOS_ID: Final = 2
UNKNOWN_ID: Final = 3
MASK_ID: Final = 32
VOCAB_SIZE: Final = 33
FIRST_RESIDUE_ID: Final = 4
RESIDUES: Final = b"LAGVSERTIDPKQNFYMHWCXBUZO.-"


def _byte_table() -> npt.NDArray[np.int32]:
    table = np.full(256, UNKNOWN_ID, np.int32)
    table[list(RESIDUES)] = FIRST_RESIDUE_ID + np.arange(len(RESIDUES), dtype=np.int32)
    table.setflags(write=False)
    return table


_TABLE: Final = _byte_table()


class Esm2Tokenizer:
    """Residue letters to ESM-2 ids: BOS, one id a byte, EOS.

    Every byte that is not one of the 27 upper-case symbols becomes one `UNKNOWN_ID`, so a protein of
    L bytes always has L + 2 tokens.

    Source: the "ESM-1b" alphabet of fair-esm (`esm.data.Alphabet`), the same in `vocab.txt` of the ESM-2
    repositories. fair-esm itself stops at an unknown letter, and transformers makes one token of a run.
    """

    vocab_size: Final = VOCAB_SIZE

    def encode(self, proteins: ByteColumn) -> TokenColumn:
        """Tokenizes n proteins.

        Args:
            proteins: n strings of upper-case residue letters.

        Returns:
            n rows of token ids; row i has length i + 2.
        """
        first, last = int(proteins.offsets[0]), int(proteins.offsets[-1])
        offsets = proteins.offsets - first + 2 * np.arange(len(proteins) + 1)
        is_residue = np.ones(offsets[-1], np.bool_)
        is_residue[offsets[:-1]] = False
        is_residue[offsets[1:] - 1] = False
        input_ids = np.empty(offsets[-1], np.int32)
        input_ids[offsets[:-1]] = BOS_ID
        input_ids[offsets[1:] - 1] = EOS_ID
        input_ids[is_residue] = _TABLE[proteins.data[first:last]]
        return TokenColumn(input_ids, offsets)
