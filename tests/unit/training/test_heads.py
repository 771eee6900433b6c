from pathlib import Path

import numpy as np
import pytest

from tests.made_models import MadeModels, MadeRun, plan_run, write_contigs
from virnuc_core.errors import UsageError
from virnuc_core.inference.runner import Scorer
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.results.integrity import check_run
from virnuc_core.training.heads import (
    count_parts,
    read_features,
    record_of_frames,
    sample_frames,
    score_frames,
)
from virnuc_core.training.labels import RecordTable


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, made_models: MadeModels) -> MadeRun:
    """Vectors to train on, in several shards."""
    folder = tmp_path_factory.mktemp("training")
    fasta = write_contigs(folder / "contigs.fa")
    made = plan_run(folder / "head.safetensors.run", fasta, made_models.config(head=None), kind="train")
    made.compute()
    return made


def made_table(run: MadeRun) -> RecordTable:
    """Every other record is viral, and three consecutive records are a group."""
    rows = np.arange(int(run.store.record_number.max()))
    return RecordTable(
        names=tuple(map(str, rows)),
        classes=rows % 2,
        class_names=("viral", "other"),
        lengths=np.full(len(rows), 60),
        groups=rows // 3,
    )


def test_a_plan_to_train_has_vectors_and_no_head(
    run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    assert (run.plan.kind, run.plan.head, run.plan.chunk_length) == ("train", None, 60)
    assert len(run.plan.shards) > 1
    with pytest.raises(UsageError, match="--embeddings none"):
        plan_run(
            tmp_path / "none",
            write_contigs(tmp_path / "contigs.fa"),
            made_models.config(head=None, embeddings="none"),
            kind="train",
        )


def test_features_are_the_vectors_of_the_shards(run: MadeRun) -> None:
    results = [result for _, result in iter_shard_results(run.folder, run.plan)]
    dna, protein = (
        np.concatenate([vectors for result in results if (vectors := getattr(result, name)) is not None])
        for name in ("dna", "protein")
    )
    everything = np.arange(run.store.num_frames)
    some = everything[3::7]
    (whole, part, none), work = read_features(run.folder, run.plan, [everything, some, some[:0]])
    np.testing.assert_array_equal(whole, np.concatenate([dna, protein], axis=1))
    np.testing.assert_array_equal(part, whole[some])
    assert len(none) == 0
    assert work.frames == run.store.num_frames


def test_scores_are_those_of_a_run_with_that_head(run: MadeRun, made_models: MadeModels) -> None:
    rows = np.arange(run.store.num_frames)[1::3]
    scores = score_frames(run.folder, run.plan, made_models.head, rows)
    [features], _ = read_features(run.folder, run.plan, [rows])
    width = run.plan.models[0].spec.embedding_dim
    expected = Scorer(made_models.head, "cpu").score(features[:, :width], features[:, width:])
    np.testing.assert_array_equal(scores, expected)


def test_frames_are_sampled_from_their_part_and_counted(run: MadeRun) -> None:
    table, records = made_table(run), record_of_frames(run.store)
    assert len(records) == run.store.num_frames
    is_usable = np.isin(np.arange(len(table.names)), records)
    part = (table.groups % 3).astype(np.int8)
    sampled = sample_frames(table, records, part == 1, 0.6, 10_000, np.random.default_rng(0))
    assert set(part[records[sampled.rows]].tolist()) == {1}
    assert sampled.weights[sampled.is_viral].sum() == pytest.approx(0.5)
    np.testing.assert_array_equal(sampled.is_viral, table.is_viral[records[sampled.rows]])

    counts = count_parts(table, part, records, is_usable)
    assert sum(one.frames for one in counts) == run.store.num_frames
    assert sum(one.records for one in counts) == is_usable.sum()
    assert sum(one.frames for one in counts if one.part == "validation") == len(sampled.rows)


def test_a_run_to_train_is_checked_as_any_other(run: MadeRun) -> None:
    findings = check_run(run.folder, thorough=True)
    missing = {found.path.name for found in findings if found.is_bad}
    assert missing == {"run.json", "head.safetensors"}, "only what the fit makes is not there"
