"""ESM-2 token ids against fair-esm and by hand, and files that are no tokenizer; tests/golden has those of DNABERT-S."""

import json
from pathlib import Path

import esm
import numpy as np
import pytest

from tests.made_hostile import hostile_json, hostile_tokenizers
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError

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


def test_the_size_of_a_vocabulary_with_holes_is_that_of_the_highest_id(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(CRAFTED["ids with holes"])
    assert DnabertTokenizer(path).vocab_size == 5001


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    path, plain = tmp_path / "tokenizer.json", CRAFTED["plain"]
    path.write_bytes(plain)
    assert rows_of(DnabertTokenizer(path).encode(ByteColumn.from_strings(["CN"]))) == [[1, 4, 0, 2]]
    path.write_text(json.dumps(json.loads(plain) | {"post_processor": None}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read \(it does not add \[CLS\]"):
        DnabertTokenizer(path)
    for content in HOSTILE.values():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json (cannot be read|is damaged)"):
            DnabertTokenizer(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        DnabertTokenizer(path)
