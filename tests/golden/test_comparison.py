"""The programs of the comparison, and both engines on real sequences."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.made_models import ESM2, GOLDEN, make_esm2, make_models
from virnuc_core.doctor.comparison import (
    bert_with_alibi,
    compare_model,
    compare_vectors,
    embed_with_original,
)
from virnuc_core.models.hub import open_checkpoint


def test_fair_esm_as_it_is_run_for_a_comparison() -> None:
    checkpoint = open_checkpoint(str(ESM2), "esm2")
    with np.load(GOLDEN / "esm2" / "golden.npz") as golden:
        program, vectors = embed_with_original(checkpoint, golden["sequences"].tolist(), "cpu")
        np.testing.assert_allclose(vectors, golden["mean_layer4"], rtol=0, atol=1e-5)
    assert program == "fair-esm 2.0.0"


@torch.inference_mode()
def test_bert_with_alibi_is_the_authors_model() -> None:
    hidden_states = bert_with_alibi(open_checkpoint(str(GOLDEN / "dnabert_s"), "dnabert_s"), "cpu")
    with np.load(GOLDEN / "dnabert_s" / "golden.npz") as golden:
        ids = torch.from_numpy(golden["input_ids"].astype(np.int64))
        for begin, end in pairwise(golden["cu_seqlens"].tolist()):
            found = hidden_states(ids[None, begin:end]).numpy()
            np.testing.assert_allclose(found, golden["hidden_states"][begin:end], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["fair-esm", "transformers", pytest.param("dnabert", marks=pytest.mark.slow)]
)
def test_both_engines_equal_the_original(name: str, tmp_path: Path) -> None:
    model = {
        "fair-esm": ESM2,
        "transformers": make_esm2(tmp_path / "esm2"),
        "dnabert": make_models(tmp_path).dnabert,
    }[name]
    found = compare_model(str(model))
    assert found.program.startswith("fair-esm" if name == "fair-esm" else "transformers")
    assert {(run.engine, run.precision) for run in found.runs} >= {("reference", "fp32"), ("packed", "fp32")}
    assert found.is_same, found.summary
    assert found.num_sequences == 8
    assert found.summary.endswith("verdict: the same within rounding")


@pytest.mark.parametrize("error", [1e-3, np.nan])
def test_other_vectors_are_told_apart(error: float) -> None:
    theirs = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    ours = theirs.copy()
    ours[3, 5] += error
    assert not compare_vectors(ours, theirs, "packed", "fp32").is_same
    assert compare_vectors(theirs, theirs, "packed", "fp32").is_same
    shuffled = theirs[::-1].copy()
    assert not compare_vectors(shuffled, theirs, "packed", "fp8").is_same
