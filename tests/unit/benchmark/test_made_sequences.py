from pathlib import Path

import numpy as np
import pytest

from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.benchmark.made_sequences import draw_lengths, random_sequences, random_tokens, write_fasta
from virnuc_core.benchmark.settings import Lengths
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.weights import read_spec, tokenizer_path
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.specs import Family


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_fixed_lengths(rng: np.random.Generator) -> None:
    assert draw_lengths(Lengths("fixed", 166), 3, rng).tolist() == [166] * 3


def test_lognormal_lengths_are_like_those_of_proteins(rng: np.random.Generator) -> None:
    drawn = draw_lengths(Lengths("lognormal"), 20_000, rng)
    assert (drawn.min(), drawn.max()) == (30, 1022)
    assert 320 < drawn.mean() < 350


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_made_tokens_are_like_tokenized_sequences(family: Family, rng: np.random.Generator) -> None:
    checkpoint = resolve_checkpoint("random:tiny", family)
    spec = read_spec(checkpoint)
    made = random_tokens(spec, np.array([20, 8]), rng)
    sequences = random_sequences(family, np.array([50, 90]), rng)
    tokenizer = Esm2Tokenizer() if family == "esm2" else DnabertTokenizer(tokenizer_path(checkpoint))
    real = tokenizer.encode(sequences)
    assert made.num_tokens.tolist() == [20, 8]
    for tokens in (made, real):
        first, last = tokens.input_ids[tokens.offsets[:-1]], tokens.input_ids[tokens.offsets[1:] - 1]
        specials = {int(first[0]), int(last[0])}
        assert (len(set(first.tolist())), len(set(last.tolist()))) == (1, 1)
        assert specials == ({0, 2} if family == "esm2" else {1, 2})
        inside = np.delete(tokens.input_ids, np.concatenate((tokens.offsets[:-1], tokens.offsets[1:] - 1)))
        assert inside.min() >= 4
        assert inside.max() < (24 if family == "esm2" else spec.vocab_size)


def test_written_sequences_come_back(tmp_path: Path, rng: np.random.Generator) -> None:
    sequences = random_sequences("esm2", np.array([30, 5, 12]), rng)
    write_fasta(tmp_path / "made.fa", sequences)
    store = build_frame_store([tmp_path / "made.fa"], tmp_path / "frames", None, "protein")
    assert store.protein is not None
    assert store.protein.to_strings() == sequences.to_strings()
