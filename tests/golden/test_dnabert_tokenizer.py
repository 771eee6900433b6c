"""The published DNABERT-2 / DNABERT-S vocabulary."""

from pathlib import Path

import numpy as np
import pytest

from virnuc_core.batching.dnabert_tokenizer import DnabertTokenizer
from virnuc_core.columns import ByteColumn

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture
def tokenizer(shared_dir: Path) -> DnabertTokenizer:
    return DnabertTokenizer(shared_dir / "golden" / "dnabert_tokenizer" / "tokenizer.json")


def test_known_ids(tokenizer: DnabertTokenizer) -> None:
    tokens = tokenizer.encode(ByteColumn.from_strings(["ATCGATCGATCGNNNATTT", "acgt"]))
    assert tokens.input_ids.tolist() == [1, 5, 359, 359, 16, 7, 0, 0, 0, 2061, 8, 2, 1, 0, 0, 0, 0, 2]
    assert tokenizer.vocab_size == 4096


def test_token_counts_of_the_authors_tokenizer(tokenizer: DnabertTokenizer) -> None:
    golden = np.load(GOLDEN / "dnabert_s" / "golden_strings.npz")
    tokens = tokenizer.encode(ByteColumn.from_strings(golden["sequences"].tolist()))
    assert tokens.num_tokens.tolist() == golden["num_tokens"].tolist()
    assert max(golden["num_tokens"]) > 636, "no sequence shows that the file's truncation is off"


def test_500_and_300_bp_have_the_token_counts_of_the_published_vocabulary(
    tokenizer: DnabertTokenizer,
) -> None:
    letters = np.random.default_rng(0).choice(list("ACGT"), (50, 500))
    for length, low, high in ((500, 90, 125), (300, 50, 80)):
        rows = ["".join(row[:length]) for row in letters]
        counts = tokenizer.encode(ByteColumn.from_strings(rows)).num_tokens
        assert counts.min() >= low
        assert counts.max() <= high
