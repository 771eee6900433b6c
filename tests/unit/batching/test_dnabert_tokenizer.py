"""The DNABERT-S tokenizer on a small vocabulary made here."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from virnuc_core.batching import dnabert_tokenizer
from virnuc_core.batching.dnabert_tokenizer import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError

VOCABULARY = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "A": 3, "C": 4, "G": 5, "T": 6, "AC": 7, "ACAC": 8}


def make_tokenizer(path: Path, *, specials: bool = True) -> Path:
    model = models.BPE(vocab=VOCABULARY, merges=[("A", "C"), ("AC", "AC")], unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(path))
    return path


def encode(path: Path, *sequences: str) -> list[list[int]]:
    tokens = DnabertTokenizer(path).encode(ByteColumn.from_strings(sequences))
    return [tokens.input_ids[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json")
    assert encode(path, "ACACAC", "A", "GTGTGTGT") == [
        [1, 8, 7, 2],
        [1, 3, 2],
        [1, 5, 6, 5, 6, 5, 6, 5, 6, 2],
    ]


def test_letters_outside_of_the_vocabulary_are_one_unknown_each(tmp_path: Path) -> None:
    assert encode(make_tokenizer(tmp_path / "t.json"), "ANNac") == [[1, 3, 0, 0, 0, 0, 2]]


def test_empty_sequences_and_empty_columns(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json")
    assert encode(path, "", "A") == [[1, 2], [1, 3, 2]]
    assert encode(path) == []


def test_blocks_do_not_change_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tokenizer(tmp_path / "t.json")
    sequences = ["ACAC", "", "G" * 40, "T", "ACG", "AC" * 9]
    whole = encode(path, *sequences)
    monkeypatch.setattr(dnabert_tokenizer, "_BLOCK_BASES", 8)
    assert encode(path, *sequences) == whole


def test_a_view_of_some_rows_is_tokenized_alone(tmp_path: Path) -> None:
    column = ByteColumn.from_strings(["GGGG", "ACG", "T"])
    tokens = DnabertTokenizer(make_tokenizer(tmp_path / "t.json")).encode(column.rows(1, 3))
    assert tokens.input_ids.tolist() == [1, 7, 5, 2, 1, 6, 2]
    assert tokens.offsets.tolist() == [0, 4, 7]


def test_vocabulary_size_is_that_of_the_file(tmp_path: Path) -> None:
    assert DnabertTokenizer(make_tokenizer(tmp_path / "t.json")).vocab_size == len(VOCABULARY)


def test_a_tokenizer_without_cls_and_sep_is_refused(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t.json", specials=False)
    with pytest.raises(CheckpointError, match=r"t\.json does not put \[CLS\]"):
        DnabertTokenizer(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", json.dumps({"model": {}}).encode()])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"t\.json cannot be read"):
        DnabertTokenizer(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        DnabertTokenizer(tmp_path / "absent.json")
