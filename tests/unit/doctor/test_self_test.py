"""The small run on each device, and what is said of a device that computes wrongly."""

import numpy as np
import pytest

from virnuc_core.doctor.self_test import _Outcome, compare, self_test_findings

GENERATOR = np.random.default_rng(0)
VECTORS = GENERATOR.standard_normal((6, 8)).astype(np.float32)
SCORES = np.full((6, 2), 0.5, np.float32)
REFERENCE = _Outcome((VECTORS, VECTORS), SCORES)


def test_the_devices_of_this_machine_compute_rightly() -> None:
    findings = list(self_test_findings())
    assert findings[-1].name == "cpu"
    assert [finding.summary for finding in findings if finding.state != "ok"] == []


@pytest.mark.parametrize("wrong", [np.nan, 50.0])
def test_wrong_vectors_are_a_problem_of_the_device(wrong: float) -> None:
    vectors = VECTORS.copy()
    vectors[3, 2] = wrong
    found = compare("cuda:0", _Outcome((VECTORS, vectors), SCORES), REFERENCE)
    assert (found.state, found.is_device) == ("problem", True)
    assert "computes wrongly" in found.advice


def test_wrong_scores_are_a_problem_of_the_device() -> None:
    assert compare("cuda:0", _Outcome((VECTORS, VECTORS), SCORES + 0.02), REFERENCE).state == "problem"
    assert compare("cuda:0", _Outcome((VECTORS, VECTORS), SCORES + 0.001), REFERENCE).state == "ok"
