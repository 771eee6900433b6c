"""Scores as bytes: what they lose, and whose they are."""

from pathlib import Path

import numpy as np
import pytest

from tests.made_reports import MadeContig, island, many_contigs, write_run
from virnuc_core.errors import DamagedFileError
from virnuc_core.results.report import rows
from virnuc_core.results.report.rows import iter_contigs
from virnuc_core.results.report.tracks import (
    BINS,
    LEVELS,
    NO_SCORE,
    choose_tracks,
    histogram,
    quantise,
    read_tracks,
)


def test_a_byte_keeps_a_probability_to_half_a_level_and_its_side_of_one_half() -> None:
    p_virus = np.concatenate([np.linspace(0, 1, 100_001), [0.5, np.nextafter(0.5, 0)]])
    levels = quantise(p_virus)
    again = np.minimum(1, (levels + 0.5) / LEVELS)
    assert np.abs(again - p_virus).max() <= 0.5 / LEVELS + 1e-12
    assert ((again >= 0.5) == (p_virus >= 0.5)).all()
    assert levels.max() == LEVELS < NO_SCORE
    assert quantise(np.array([np.nan, 0.0])).tolist() == [NO_SCORE, 0]


def test_every_known_probability_is_in_one_bin() -> None:
    p_virus = np.array([0.0, 0.02, 0.0199, 0.5, 0.58, 1.0, np.nan])
    counts = histogram(p_virus)
    assert len(counts) == BINS
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {0: 2, 1: 1, 25: 1, 29: 1, 49: 1}


def test_scores_are_those_of_the_chosen_contigs_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_BLOCK_ROWS", 7)
    made = [*many_contigs(4), island("long"), MadeContig(name="one", p_virus=(0.7,))]
    folder, _ = write_run(tmp_path, made)
    tracks = read_tracks(folder.predictions, (1, 4), 5 + 120)
    expected = [*made[1].p_virus, *made[4].p_virus]
    assert tracks.levels == quantise(np.array(expected, float)).tobytes()
    assert tracks.histogram.sum() == sum(len(contig.scored) for contig in made)


def test_the_first_contigs_with_enough_chunks_are_drawn_as_far_as_there_is_room(tmp_path: Path) -> None:
    short = MadeContig(name="short", p_virus=(0.9, 0.9, 0.9))
    closed = MadeContig(name="closed", p_virus=(None,) * 9)
    folder, _ = write_run(tmp_path, [short, closed, island("long"), *many_contigs(3)[1:]])
    contigs = list(iter_contigs(folder.contigs, folder.regions))
    assert choose_tracks(contigs, 1000) == (2, 3, 4)
    assert choose_tracks(contigs, 124) == (2,)
    assert choose_tracks(reversed(contigs), 10) == (3, 4)
    assert choose_tracks(contigs, 10) == (3, 4)


def test_chunks_that_are_missing_are_noticed(tmp_path: Path) -> None:
    folder, _ = write_run(tmp_path, [island("long")])
    folder.predictions.write_text(folder.predictions.read_text().rpartition("long\t")[0])
    with pytest.raises(DamagedFileError, match="119 chunks of contigs that have 120"):
        read_tracks(folder.predictions, (0,), 120)


@pytest.mark.parametrize("cell", ["1.5", "-0.1", "much"])
def test_what_is_no_probability_is_refused(cell: str, tmp_path: Path) -> None:
    folder, _ = write_run(tmp_path, [island("long")])
    folder.predictions.write_text(folder.predictions.read_text().replace("0.900000", cell, 1))
    with pytest.raises(DamagedFileError, match=r"predictions\.tsv"):
        read_tracks(folder.predictions, (0,), 120)
