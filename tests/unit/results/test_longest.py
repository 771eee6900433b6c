"""A run over the longest stop-free stretches of chunks, with a head that was trained for them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.made_models import MadeModels, MadeRun, plan_run
from tests.made_moves import begin_move, write_results
from tests.slow_frames import slow_strands
from virnuc_core.errors import MismatchError
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.models.catalogue import frames_of
from virnuc_core.results.embeddings import Embeddings, export_embeddings
from virnuc_core.results.rescore import score_embeddings
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import FRAME_NAMES


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, contigs: Path, made_models: MadeModels) -> MadeRun:
    """The same as `finished_run`, with the other head."""
    config = made_models.config(head=str(made_models.longest_head))
    made = plan_run(tmp_path_factory.mktemp("longest"), contigs, config)
    made.compute()
    write_results(made)
    return made


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False)


def test_the_head_decides_what_is_embedded(run: MadeRun, finished_run: MadeRun) -> None:
    rules = [(one.store.meta.frames, read_plan(one.folder.plan).frames) for one in (run, finished_run)]
    assert rules == [("longest", "longest"), ("open", "open")]


def test_every_chunk_with_a_stretch_has_a_score(run: MadeRun, finished_run: MadeRun) -> None:
    chunks, open_chunks = read(run.folder.predictions), read(finished_run.folder.predictions)
    is_scored = np.isin(np.arange(run.store.num_chunks), run.store.frame_chunk)
    assert (chunks.status == np.where(is_scored, "scored", "no_stretch")).all()
    assert set(chunks.status) == {"scored", "no_stretch"}
    assert is_scored.sum() > (open_chunks.status == "scored").sum()
    assert len(read(run.folder.prediction_results)) == run.store.num_frames
    assert len(read(run.folder.highest_score)) == is_scored.sum()


def test_stored_starts_are_where_the_dna_begins(run: MadeRun, finished_run: MadeRun, tmp_path: Path) -> None:
    store = FrameStore.open(run.folder.frames)
    assert store.dna is not None
    assert store.protein is not None
    rows = zip(store.frame_chunk, store.frame_number, store.frame_start, store.dna.to_strings(), strict=True)
    for chunk, frame, start, dna in rows:
        bases = store.sequence(store.chunk_record[chunk]).decode()
        strands = dict(slow_strands(bases[store.chunk_start[chunk] : store.chunk_end[chunk]]))
        assert strands[FRAME_NAMES[frame][0]][start : start + len(dna)] == dna
    assert store.dna.lengths.tolist() == (3 * store.protein.lengths).tolist()

    with Embeddings(run.folder.embeddings, own=True) as file:
        assert (file.frames, file.attrs["frames"]) == ("longest", "longest")
        assert file.starts is not None
        assert file.starts.tolist() == store.frame_start.tolist() == file.as_dataframe().start.tolist()
    export_embeddings(run.folder.embeddings, tmp_path / "x.npz")
    with Embeddings(tmp_path / "x.npz") as exported:
        assert exported.frames == "longest"
        assert exported.starts is not None
        assert exported.starts.tolist() == store.frame_start.tolist()
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        assert (file.frames, file.starts) == ("open", None)


def test_vectors_are_scored_by_a_head_for_them_only(
    run: MadeRun, finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    out = tmp_path / "scores.tsv"
    assert score_embeddings(run.folder.embeddings, str(made_models.longest_head), out) == run.store.num_frames
    assert out.read_bytes() == run.folder.prediction_results.read_bytes()
    for made, head, message in (
        (
            run,
            made_models.head,
            "for the open reading frames of chunks, and these .* longest stop-free stretches",
        ),
        (
            finished_run,
            made_models.longest_head,
            "longest stop-free stretches of chunks, .* open reading frames",
        ),
    ):
        with pytest.raises(MismatchError, match=message):
            score_embeddings(made.folder.embeddings, str(head), out)


def test_a_run_is_not_resumed_or_moved_with_a_head_for_other_frames(
    run: MadeRun, contigs: Path, made_models: MadeModels
) -> None:
    config = made_models.config()
    message = (
        r"frames \(--head\) were longest stop-free stretches, now open reading frames\. .* another --out"
    )
    with pytest.raises(MismatchError, match=message):
        index_inputs(run.folder, [str(contigs)], config.chunk_length, "dna", frames_of(config))
    with pytest.raises(
        MismatchError, match=r"trained for the open reading frames .*--frames longest.*virnuc predict"
    ):
        begin_move(run, config)
