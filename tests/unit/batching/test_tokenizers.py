"""ESM-2 token ids against fair-esm and by hand; the DNABERT-S tokenizer on a small vocabulary."""

import json
from pathlib import Path

import esm
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from tests.made_hostile import hostile_json, hostile_tokenizers
from tests.made_models import tokenizer
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError

VOCABULARY = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "A": 3, "C": 4, "G": 5, "T": 6, "AC": 7, "ACAC": 8}
CRAFTED = hostile_tokenizers()
USABLE = ("plain", "ids with holes", "endless merges", "no letter")
HOSTILE = {
    "empty": b"",
    "not JSON": b"{",
    "not text": b"\xff\xfe",
    "no vocabulary": json.dumps({"model": {}}).encode(),
    **{name: content for name, content in CRAFTED.items() if name not in USABLE},
    **hostile_json("model"),
}


def rows_of(tokens: TokenColumn) -> list[list[int]]:
    assert tokens.input_ids.dtype == np.int32
    return [row.tolist() for row in np.split(tokens.input_ids, tokens.offsets[1:-1])][: len(tokens)]


def esm2(*proteins: str) -> list[list[int]]:
    return rows_of(Esm2Tokenizer().encode(ByteColumn.from_strings(proteins)))


def test_esm2_ids_are_those_of_fair_esm() -> None:
    alphabet = esm.Alphabet.from_architecture("ESM-1b")
    symbols = [token for token in alphabet.all_toks if len(token) == 1]
    assert len(symbols) == 27
    ids = [alphabet.get_idx(symbol) for symbol in symbols]
    assert esm2("".join(symbols)) == [[alphabet.cls_idx, *ids, alphabet.eos_idx]]
    ours = (Esm2Tokenizer.unk_id, Esm2Tokenizer.mask_id, Esm2Tokenizer.vocab_size)
    assert ours == (alphabet.unk_idx, alphabet.mask_idx, len(alphabet))


def test_unknown_bytes_empty_proteins_and_a_view_of_some() -> None:
    assert esm2("AJ*a A") == [[0, 5, 3, 3, 3, 3, 5, 2]]
    assert esm2("", "M", "") == [[0, 2], [0, 20, 2], [0, 2]]
    assert esm2() == []
    tokens = Esm2Tokenizer().encode(ByteColumn.from_strings(["AAAA", "LAG", "", "V"]).rows(1, 4))
    assert rows_of(tokens) == [[0, 4, 5, 6, 2], [0, 2], [0, 7, 2]]
    assert tokens.num_tokens.tolist() == [5, 2, 3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer.json")


def make_tokenizer(path: Path) -> Path:
    made = tokenizer(list(VOCABULARY), [("A", "C"), ("AC", "AC")])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    made.enable_truncation(4)
    made.enable_padding(length=12)
    made.save(str(path))
    return path


@pytest.mark.parametrize("times", [1, 10_000])  # encoded at once, and in several blocks
def test_dnabert_ids(path: Path, times: int) -> None:
    """Truncation and padding of the file are ignored; other letters become one [UNK] each."""
    strings = ["ACACAC", "", "A", "GTGTGTGT", "ANNac", "AC" * 9]
    column = ByteColumn.from_strings(["TTT", *strings * times])
    ours = DnabertTokenizer(path)
    assert rows_of(ours.encode(column.rows(1, len(column)))) == times * [
        [1, 8, 7, 2],
        [1, 2],
        [1, 3, 2],
        [1, 5, 6, 5, 6, 5, 6, 5, 6, 2],
        [1, 3, 0, 0, 0, 0, 2],
        [1, 8, 8, 8, 8, 7, 2],
    ]
    assert rows_of(ours.encode(column.rows(0, 0))) == []
    assert ours.vocab_size == len(VOCABULARY)


def test_the_size_of_a_vocabulary_with_holes_is_that_of_the_highest_id(path: Path) -> None:
    path.write_bytes(CRAFTED["ids with holes"])
    assert DnabertTokenizer(path).vocab_size == 5001


def test_unusable_files_are_refused(path: Path) -> None:
    path.write_bytes(CRAFTED["plain"])
    assert rows_of(DnabertTokenizer(path).encode(ByteColumn.from_strings(["CN"]))) == [[1, 4, 0, 2]]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not put \[CLS\]"):
        DnabertTokenizer(path)
    for content in HOSTILE.values():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json (cannot be read|is damaged)"):
            DnabertTokenizer(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        DnabertTokenizer(path)
