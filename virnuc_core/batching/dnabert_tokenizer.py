"""DNABERT-S token ids by the byte-pair encoding of its `tokenizer.json`."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from virnuc_core.batching.packed_batch import TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError
from virnuc_core.files import parse_object

# Encodings hold far more than ids (about 0.5 kB a token), so they are made and dropped block by block. They
# become Python objects at a stroke, in which no other thread runs: 1 ms for a block of this size.
_BLOCK_BASES: Final = 1 << 18
_WORDS: Final = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
_MOST_IDS: Final = 1 << 20


class DnabertTokenizer:
    """DNA letters to DNABERT-S ids: [CLS], byte pairs, [SEP]; ids are those of the file.

    The truncation and padding that published files carry are switched off. Letters without an entry in
    the vocabulary (lower case, IUPAC codes) become one [UNK] each.

    Attributes:
        vocab_size: the highest id and one, added tokens included.
    """

    def __init__(self, path: Path) -> None:
        """Reads a tokenizer file.

        Args:
            path: a `tokenizer.json` of the tokenizers library.

        Raises:
            CheckpointError: the file is missing or damaged, adds no [CLS] and [SEP], or is of another kind.
        """
        self._tokenizer = _read(path)
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

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


def _require_byte_pairs(document: Mapping[str, Any]) -> None:
    """Lets plain byte pairs through: other parts could take for ever, multiply letters, or give ids by chance.

    Raises:
        ValueError: the file has other parts.
    """
    model, added, words = document["model"], document.get("added_tokens") or (), document.get("pre_tokenizer")
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    if model.get("type", "BPE") != "BPE" or model.get("dropout") or model["unk_token"] not in model["vocab"]:
        raise ValueError(
            "its model is not byte pairs with an unknown token, always the same for the same letters"
        )
    if document.get("normalizer") or (words and words["type"] not in _WORDS):
        raise ValueError("it changes letters, or cuts them by patterns")
    if "" in ids or not all(type(number) is int and 0 <= number < _MOST_IDS for number in ids.values()):
        raise ValueError(f"its ids are not numbers from 0 to {_MOST_IDS - 1}, each of a word")


def _read(path: Path) -> Tokenizer:
    """The tokenizer of a file, without truncation and padding, proven to add [CLS] and [SEP]."""
    try:
        content = path.read_bytes()
        _require_byte_pairs(parse_object(content))
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Each sequence is a word that hardly comes again. What is remembered of them stays when the tokenizer is gone.
        tokenizer.model._resize_cache(0)
        specials = [tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")]
        around_nothing = tokenizer.encode("").ids
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"tokenizer {path} cannot be read ({error}). Put the model's own tokenizer.json there."
        ) from error
    except BaseException as error:
        # The library's panics are no Exceptions, and their class has no place to be imported from.
        if type(error).__name__ == "PanicException":
            raise CheckpointError(
                f"tokenizer {path} is damaged ({error}). Put the model's own tokenizer.json there."
            ) from error
        raise
    if around_nothing != specials:
        raise CheckpointError(
            f"tokenizer {path} does not put [CLS] before and [SEP] after a sequence, so it is not the one "
            "of a DNABERT-S model. Put the model's own tokenizer.json there."
        )
    return tokenizer
