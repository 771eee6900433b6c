"""ESM-2 token ids, against fair-esm and by hand."""

import esm
import numpy as np

from virnuc_core.batching.esm2_tokenizer import BOS_ID, EOS_ID, MASK_ID, PAD_ID, UNKNOWN_ID, Esm2Tokenizer
from virnuc_core.columns import ByteColumn


def encode(*proteins: str) -> list[list[int]]:
    tokens = Esm2Tokenizer().encode(ByteColumn.from_strings(proteins))
    return [tokens.input_ids[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]


def test_every_symbol_has_the_id_of_fair_esm() -> None:
    alphabet = esm.Alphabet.from_architecture("ESM-1b")
    symbols = [token for token in alphabet.all_toks if len(token) == 1]
    assert len(symbols) == 27
    assert encode("".join(symbols)) == [[BOS_ID, *(alphabet.get_idx(s) for s in symbols), EOS_ID]]


def test_special_ids_are_those_of_fair_esm() -> None:
    alphabet = esm.Alphabet.from_architecture("ESM-1b")
    ours = (BOS_ID, PAD_ID, EOS_ID, UNKNOWN_ID, MASK_ID, Esm2Tokenizer.vocab_size)
    theirs = (
        alphabet.cls_idx,
        alphabet.padding_idx,
        alphabet.eos_idx,
        alphabet.unk_idx,
        alphabet.mask_idx,
        len(alphabet),
    )
    assert ours == theirs


def test_each_unknown_byte_is_one_unknown_token() -> None:
    assert encode("AJ*a A") == [[0, 5, 3, 3, 3, 3, 5, 2]]


def test_empty_sequences_and_empty_columns() -> None:
    assert encode("", "M", "") == [[0, 2], [0, 20, 2], [0, 2]]
    assert encode() == []


def test_a_view_of_some_rows_is_tokenized_alone() -> None:
    column = ByteColumn.from_strings(["AAAA", "LAG", "", "V"])
    tokens = Esm2Tokenizer().encode(column.rows(1, 4))
    assert tokens.input_ids.tolist() == [0, 4, 5, 6, 2, 0, 2, 0, 7, 2]
    assert tokens.offsets.tolist() == [0, 5, 7, 10]
    assert tokens.num_tokens.tolist() == [5, 2, 3]
    assert tokens.input_ids.dtype == np.int32
