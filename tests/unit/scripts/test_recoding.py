import numpy as np

from scripts.train_bundled.recoding import recode
from virnuc_core.sequences.frames import FrameTable, open_frames


def real_looking_frames(seed: int) -> FrameTable:
    """Forward frames of random chunks without stops."""
    rng = np.random.default_rng(seed)
    bases = rng.choice(np.frombuffer(b"ACGC", np.uint8), 30 * 99)
    starts = 99 * np.arange(30)
    return open_frames(bases, starts, starts + 99)


def translated(frames_dna: list[str]) -> list[str]:
    proteins = []
    for dna in frames_dna:
        bases = np.frombuffer(dna.encode(), np.uint8)
        table = open_frames(bases, np.array([0]), np.array([3 * (len(dna) // 3)]))
        proteins += table.protein.rows(0, 1).to_strings() if len(table) and table.frame[0] == 0 else [""]
    return proteins


def test_synonymous_codons_keep_the_protein() -> None:
    frames = real_looking_frames(1)
    dna, protein = recode(frames.dna, frames.protein, 0.9, 0.0, np.random.default_rng(2))
    assert protein.to_strings() == frames.protein.to_strings()
    assert translated(dna.to_strings()) == frames.protein.to_strings()
    assert (dna.data != frames.dna.data).mean() > 0.1


def test_substitutions_change_both_alike() -> None:
    frames = real_looking_frames(3)
    dna, protein = recode(frames.dna, frames.protein, 0.5, 0.2, np.random.default_rng(4))
    assert translated(dna.to_strings()) == protein.to_strings()
    assert 0.1 < (protein.data != frames.protein.data).mean() < 0.3
    assert b"*" not in protein.data.tobytes()


def test_nothing_is_drawn_anew_at_zero() -> None:
    frames = real_looking_frames(5)
    dna, protein = recode(frames.dna, frames.protein, 0.0, 0.0, np.random.default_rng(6))
    assert dna.to_strings() == frames.dna.to_strings()
    assert protein.to_strings() == frames.protein.to_strings()
