"""The programs of the comparison, and both engines on real sequences."""

from pathlib import Path

import numpy as np
import pytest

from tests.made_models import ESM2, make_esm2, make_models
from virnuc_core.doctor.comparison import (
    compare_model,
    compare_vectors,
)


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("fair-esm", "fair-esm 2.0.0"),
        ("transformers", "transformers"),
        ("esm2:tiny", "transformers"),
        pytest.param("dnabert", "transformers", marks=pytest.mark.slow),
    ],
)
def test_both_engines_equal_the_original(name: str, program: str, tmp_path: Path) -> None:
    if name == "transformers":
        name = str(make_esm2(tmp_path / "esm2"))
    elif name == "dnabert":
        name = str(make_models(tmp_path).dnabert)
    found = compare_model(str(ESM2) if name == "fair-esm" else name)
    assert found.program.startswith(program)
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
