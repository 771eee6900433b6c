import numpy as np
import pytest

from scripts.train_bundled.recoding import recode
from virnuc_core.sequences.frames import longest_stretches, open_frames


def translated(dna: str) -> str:
    bases = np.frombuffer(dna.encode(), np.uint8)
    table = open_frames(bases, np.array([0]), np.array([3 * (len(dna) // 3)]))
    return table.protein.rows(0, 1).to_strings()[0] if len(table) and table.frame[0] == 0 else ""


@pytest.mark.parametrize(("recoded", "substituted"), [(0.9, 0.0), (0.5, 0.2), (0.0, 0.0)])
def test_codons_and_residues_change_alike(recoded: float, substituted: float) -> None:
    bases = np.random.default_rng(1).choice(np.frombuffer(b"ACGC", np.uint8), 30 * 99)
    starts = 99 * np.arange(30)
    frames = longest_stretches(bases, starts, starts + 99)
    dna, protein = recode(frames.dna, frames.protein, recoded, substituted, np.random.default_rng(2))
    assert list(map(translated, dna.to_strings())) == protein.to_strings()
    changed_bases = (dna.data != frames.dna.data).mean()
    changed_residues = (protein.data != frames.protein.data).mean()
    assert (changed_bases > 0.1) == (recoded > 0)
    assert substituted / 2 <= changed_residues <= 1.5 * substituted
    assert b"*" not in protein.data.tobytes()
