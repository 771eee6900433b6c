"""A tokenizer.json that is not plain byte pairs is refused before it is used."""

from pathlib import Path

import pytest

from benchmarks.reliability.binary_edits import hostile_json
from benchmarks.reliability.crafted import tokenizers
from virnuc_core.batching.dnabert_tokenizer import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError

USABLE = ("plain", "ids with holes", "endless merges")


def test_plain_byte_pairs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizers()["plain"])
    assert DnabertTokenizer(path).encode(ByteColumn.from_strings(["ACGTN"])).input_ids.tolist() == [
        1,
        3,
        4,
        5,
        6,
        0,
        2,
    ]


def test_the_size_is_that_of_the_highest_id(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizers()["ids with holes"])
    assert DnabertTokenizer(path).vocab_size == 5001


@pytest.mark.parametrize("name", [name for name in tokenizers() if name not in (*USABLE, "no letter")])
def test_other_parts_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizers()[name])
    with pytest.raises(CheckpointError, match=r"tokenizer .*tokenizer\.json cannot be read"):
        DnabertTokenizer(path)


@pytest.mark.parametrize("name", hostile_json("model"))
def test_other_json_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(hostile_json("model")[name])
    with pytest.raises(CheckpointError):
        DnabertTokenizer(path)
