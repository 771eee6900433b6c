"""Token ids of both models: ESM-2 by a table of bytes, DNABERT-S by the byte-pair encoding of its `tokenizer.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from virnuc_core.columns import ByteColumn, Int64, concatenated_ranges
from virnuc_core.errors import CheckpointError
from virnuc_core.files import parse_object

_MAX_VOCAB_SIZE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """Token ids of n sequences, special tokens included; sequence i is input_ids[offsets[i]:offsets[i + 1]]."""

    input_ids: npt.NDArray[np.int32]
    offsets: Int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> Int64:
        """int64 (n,), tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 (n + 1,), offsets starting at 0, as attention kernels take them."""
        bounds: npt.NDArray[np.int32] = (self.offsets - self.offsets[0]).astype(np.int32)
        return bounds

    def take(self, rows: Int64) -> "TokenColumn":
        """Copies the given rows, in the given order."""
        index, offsets = concatenated_ranges(self.offsets[rows], self.num_tokens[rows])
        return TokenColumn(self.input_ids[index], offsets)


class Esm2Tokenizer:
    """Residues to ESM-2 ids: BOS, one id per byte, EOS, so a protein of L bytes has L + 2 tokens.

    Every byte other than the 27 upper-case symbols becomes one `unk_id`.

    Source: the "ESM-1b" alphabet of fair-esm (`esm.data.Alphabet`). fair-esm itself raises on an unknown letter, and
    transformers merges a run of them into one token.
    """

    bos_id: Final = 0
    eos_id: Final = 2
    unk_id: Final = 3
    mask_id: Final = 32
    vocab_size: Final = 33
    first_residue_id: Final = 4
    residues: Final = b"LAGVSERTIDPKQNFYMHWCXBUZO.-"

    def __init__(self) -> None:
        self._table = np.full(256, self.unk_id, np.int32)
        self._table[list(self.residues)] = self.first_residue_id + np.arange(len(self.residues))

    def encode(self, proteins: ByteColumn) -> TokenColumn:
        """Tokenizes proteins of upper-case letters."""
        begin, end = int(proteins.offsets[0]), int(proteins.offsets[-1])
        offsets = proteins.offsets - begin + 2 * np.arange(len(proteins) + 1)
        is_residue = np.ones(offsets[-1], np.bool_)
        is_residue[offsets[:-1]] = False
        is_residue[offsets[1:] - 1] = False
        input_ids = np.empty(offsets[-1], np.int32)
        input_ids[offsets[:-1]] = self.bos_id
        input_ids[offsets[1:] - 1] = self.eos_id
        input_ids[is_residue] = self._table[proteins.data[begin:end]]
        return TokenColumn(input_ids, offsets)


class DnabertTokenizer:
    """DNA to DNABERT-S ids: [CLS], byte pairs, [SEP], by a `tokenizer.json` of the tokenizers library.

    Truncation and padding of published files are switched off. Letters outside the vocabulary (lower case, IUPAC
    codes) become one [UNK] each. `vocab_size` is the highest id plus one, added tokens included.

    Raises:
        CheckpointError: the file is missing or damaged, adds no [CLS] and [SEP], or is of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = _read_tokenizer(path)
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, sequences: ByteColumn) -> TokenColumn:
        """Tokenizes DNA of upper-case letters and any length."""
        # Encodings take about 0.5 kB per token, so they are made and freed block by block. Converting a block to Python
        # objects holds the GIL: 1 ms at this size.
        block_bases = 1 << 18
        blocks = [np.empty(0, np.int32)]
        offsets = np.zeros(len(sequences) + 1, np.int64)
        begin = 0
        while begin < len(sequences):
            limit = sequences.offsets[begin] + block_bases
            end = max(begin + 1, int(np.searchsorted(sequences.offsets, limit, side="right")) - 1)
            encodings = self._tokenizer.encode_batch_fast(sequences.rows(begin, end).to_strings())
            ids = [encoding.ids for encoding in encodings]
            offsets[begin + 1 : end + 1] = [len(row) for row in ids]
            blocks.append(np.fromiter(chain.from_iterable(ids), np.int32))
            begin = end
        return TokenColumn(np.concatenate(blocks), np.cumsum(offsets))


Tokenizer = Esm2Tokenizer | DnabertTokenizer


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        content = path.read_bytes()
        _require_plain_bpe(parse_object(content))
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Sequences rarely repeat, and the cache outlives the tokenizer.
        tokenizer.model._resize_cache(0)
        special_tokens = [tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")]
        if tokenizer.encode("").ids != special_tokens:
            raise ValueError("it does not add [CLS] and [SEP] to a sequence")
    except BaseException as error:
        # The library's PanicException is a BaseException and cannot be imported.
        is_panic = type(error).__name__ == "PanicException"
        if is_panic or isinstance(error, OSError | ValueError | LookupError | TypeError | AttributeError):
            problem = "is damaged" if is_panic else "cannot be read"
            raise CheckpointError(
                f"tokenizer {path} {problem} ({error}). Put the model's tokenizer.json there."
            ) from error
        raise
    return tokenizer


def _require_plain_bpe(document: Mapping[str, Any]) -> None:
    """Refuses, with ValueError, files with other components, which could hang, multiply letters, or give random ids."""
    model, added = document["model"], document.get("added_tokens") or ()
    pre_tokenizer = document.get("pre_tokenizer")
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    if model.get("type", "BPE") != "BPE" or model.get("dropout") or model["unk_token"] not in model["vocab"]:
        raise ValueError("it is not a deterministic byte-pair encoding with an unknown token")
    plain = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
    if document.get("normalizer") or (pre_tokenizer and pre_tokenizer["type"] not in plain):
        raise ValueError("it normalizes or pre-splits sequences")
    if "" in ids or not all(type(number) is int and 0 <= number < _MAX_VOCAB_SIZE for number in ids.values()):
        raise ValueError(f"its token ids are not 0 to {_MAX_VOCAB_SIZE - 1}")
