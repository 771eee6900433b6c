import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accuracy
from tests.made_models import write_contigs

pytestmark = pytest.mark.slow


def test_a_chunk_is_viral_by_its_best_scores() -> None:
    scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.85, 0.15], [0.5, 0.5]], np.float32)
    frames, chunks = accuracy.calls(scores, np.array([0, 0, 1, 2]))
    assert frames.tolist() == [False, True, False, True]
    assert chunks.tolist() == [False, False, True]


def test_fp32_agrees_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fasta = write_contigs(tmp_path / "in.fa", 12)
    out = tmp_path / "accuracy.json"
    options = ["--precision", "auto", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["accuracy", str(fasta), *options])
    accuracy.main()
    report = json.loads(out.read_text())
    found = report["against_fp32"]["auto"]
    assert report["frames"] >= report["chunks_with_frames"] > 0
    assert found["dna"]["worst_cosine"] == pytest.approx(1)
    assert found["frame_calls_agree"] == found["chunk_calls_agree"] == 1
    assert str(tmp_path) not in report["command"]
