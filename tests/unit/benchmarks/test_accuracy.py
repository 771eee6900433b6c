import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accuracy
from tests.made_models import write_contigs

pytestmark = pytest.mark.slow


def test_calls_agree_on_the_same_side_of_one_half() -> None:
    reference = np.array([0.9, 0.2, 0.5, np.nan, 0.4])
    assert accuracy.agreement(np.array([0.6, 0.1, 0.7, np.nan, 0.5]), reference) == 0.75


def test_what_auto_chooses_agrees_with_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fasta = write_contigs(tmp_path / "in.fa", 12)
    out = tmp_path / "accuracy.json"
    options = ["--precision", "auto", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["accuracy", str(fasta), *options])
    accuracy.main()
    report = json.loads(out.read_text())
    found = report["against_fp32"]["auto"]
    assert report["frames"] >= report["chunks_with_frames"] > 0
    assert found["dna"]["worst_cosine"] == pytest.approx(1, abs=1e-3)
    assert all(found[f"{unit}_calls_agree"] >= 0.9 for unit in accuracy.UNITS)
    assert str(tmp_path) not in report["command"]
