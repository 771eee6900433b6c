"""DNABERT-S ids against two other encoders, on a file in the published format, and the published vocabulary."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.models.hub import open_checkpoint

UNKNOWN, BEGIN, END = 0, 1, 2
MAX_TOKENS = 636

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def published_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled vocabulary of 4,096 words in a file with truncation and padding, like the published one."""
    tokenizer = Tokenizer.from_file(str(open_checkpoint("tiny", "dnabert_s").location / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_id=3, pad_token="[PAD]")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(published_form: Path) -> DnabertTokenizer:
    return DnabertTokenizer(published_form)


@pytest.fixture(scope="module")
def merge_pairs(published_form: Path) -> Encode:
    """Byte-pair encoding by its definition: merges the first adjacent pair of the earliest rule."""
    model = json.loads(published_form.read_text())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}

    def encode(sequence: str) -> list[int]:
        words = list(sequence)
        while len(words) > 1:
            pairs = list(pairwise(words))
            at = min(range(len(pairs)), key=lambda i: (ranks.get(pairs[i], len(ranks)), i))
            if pairs[at] not in ranks:
                break
            words[at : at + 2] = ["".join(pairs[at])]
        return [BEGIN, *(model["vocab"].get(word, UNKNOWN) for word in words), END]

    return encode


def encoded(tokenizer: DnabertTokenizer, sequences: list[str]) -> list[list[int]]:
    tokens = tokenizer.encode(ByteColumn.from_strings(sequences))
    return [ids.tolist() for ids in np.split(tokens.input_ids, tokens.offsets[1:-1])]


def test_ids_are_those_of_transformers(published_form: Path, tokenizer: DnabertTokenizer) -> None:
    generator = random.Random(0)
    lengths = (0, 1, 2, 25, 300, 500, 4200)
    sequences = ["".join(generator.choices("ACGT", k=length)) for length in lengths]
    sequences += ["acgt", "ACGTNNNNACGTacgtRYSWKM", "N" * 700, "ACGTTTGA" * 400]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(published_form))(sequences, truncation=False)
    ours = encoded(tokenizer, sequences)
    assert ours == theirs["input_ids"]
    assert max(map(len, ours)) > MAX_TOKENS, "no sequence shows that the file's truncation is off"
    # A view of rows, in several blocks.
    column = ByteColumn.from_strings(["TTT", *sequences[:4] * 10_000])
    many = tokenizer.encode(column.rows(1, len(column)))
    assert many.num_tokens.tolist() == [len(ids) for ids in ours[:4]] * 10_000
    assert many.input_ids.tolist() == [number for ids in ours[:4] for number in ids] * 10_000


@settings(max_examples=50)
@given(st.lists(st.text("ACGT", max_size=300) | st.text("ACGTacgtNRY", max_size=60), max_size=5))
def test_ids_follow_the_definition_of_byte_pairs(
    tokenizer: DnabertTokenizer, merge_pairs: Encode, sequences: list[str]
) -> None:
    expected = [merge_pairs(sequence) for sequence in sequences]
    assert encoded(tokenizer, sequences)[: len(sequences)] == expected


def test_the_published_vocabulary_gives_the_counts_of_the_authors_tokenizer(shared_dir: Path) -> None:
    tokenizer = DnabertTokenizer(shared_dir / "golden" / "dnabert_tokenizer" / "tokenizer.json")
    assert encoded(tokenizer, ["ATCGATCGATCGNNNATTT"]) == [[1, 5, 359, 359, 16, 7, 0, 0, 0, 2061, 8, 2]]
