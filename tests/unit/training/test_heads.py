import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.made_models import MadeModels, MadeRun, plan_run, write_contigs
from virnuc_core.errors import UsageError
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.models.catalogue import NOT_CALIBRATED, read_purpose
from virnuc_core.results.inspect import inspect_path
from virnuc_core.settings import TrainerSettings
from virnuc_core.training.fit import vectors_of
from virnuc_core.training.heads import (
    LEAST_TO_CALIBRATE,
    RecordSplit,
    TrainingData,
    fit_head,
    read_samples,
    record_of_frames,
    sample_runs,
    split_labelled,
)
from virnuc_core.training.labels import RecordTable
from virnuc_core.training.split import PARTS, TEST, TRAIN, VALIDATION, sample_weights


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, made_models: MadeModels) -> MadeRun:
    """Vectors to train on, in several shards."""
    folder = tmp_path_factory.mktemp("training")
    fasta = write_contigs(folder / "contigs.fa")
    made = plan_run(folder / "head.safetensors.run", fasta, made_models.config(head=None), kind="train")
    made.compute()
    return made


def table_of(run: MadeRun, *, classes: int) -> RecordTable:
    """A class for each record in turn, and groups of two records."""
    numbers = np.arange(int(run.store.record_number.max()))
    return RecordTable(
        names=tuple(map(str, numbers)),
        classes=numbers % classes,
        class_names=("viral", "bacteria", "plasmid")[:classes],
        lengths=np.full(len(numbers), 60),
        groups=numbers // 2,
    )


def test_a_run_to_train_has_vectors_and_no_head(
    run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    assert (run.plan.kind, run.plan.head) == ("train", None)
    assert len(run.plan.shards) > 1
    [problem] = inspect_path(run.folder.root).problems
    assert "run.json is missing" in problem, "only what the fit makes is not there"
    fasta, config = write_contigs(tmp_path / "contigs.fa"), made_models.config(head=None, embeddings="none")
    with pytest.raises(UsageError, match="--embeddings none"):
        plan_run(tmp_path / "none", fasta, config, kind="train")


def test_features_are_those_of_the_shards_and_frames_are_counted(run: MadeRun) -> None:
    table, settings = table_of(run, classes=2), settings_of(10_000).model_copy(update={"held_out": 0.3})
    table = replace(table, groups=np.arange(len(table.names)))
    split, records = split_labelled(run.folder, table, settings), record_of_frames(run.store)
    data = TrainingData(run.folder, run.plan, run.store, table, split.part)
    samples, work = read_samples(data, settings)
    results = [result for _, result in iter_shard_results(run.folder, run.plan)]
    dna, protein = (np.concatenate([getattr(one, name) for one in results]) for name in ("dna", "protein"))
    whole = np.concatenate([dna, protein], axis=1)
    for part, runs in zip((TRAIN, VALIDATION), samples, strict=True):
        rows, vectors = np.flatnonzero(split.part[records] == part), vectors_of(runs)
        np.testing.assert_array_equal(vectors.features, whole[rows])
        np.testing.assert_array_equal(vectors.is_viral, table.is_viral[records[rows]])
        weights = sample_weights(vectors.is_viral, records[rows], settings.group_power)
        np.testing.assert_allclose(vectors.weights, weights)
        own = [one for one in split.counts if one.part == PARTS[part]]
        assert sum(one.frames for one in own) == len(rows)
    assert work.frames == run.store.num_frames == sum(one.frames for one in split.counts)
    assert sum(one.records for one in split.counts) == len(np.unique(records))
    both = [records[rows][vectors.is_viral == kind] for kind in (True, False)]
    assert split.validation_groups == tuple(len(np.unique(groups)) for groups in both)


@pytest.mark.parametrize(
    ("validation", "test", "warnings"),
    [
        ((6, 90), (6, 6), ["not calibrated: .* validation records: 6 viral and 90 other", "The metrics are uncertain"]),
        ((90, 9), (30, 30), ["not calibrated: .*: 90 viral and 9 other"]),
        ((10, 90), (30, 30), ["The calibration is uncertain. .*: 10 viral"]),
        ((30, 30), (90, 29), ["The metrics are uncertain. Groups of test records: 90 viral and 29"]),
        ((30, 30), (30, 30), []),
    ],
)  # fmt: skip
def test_few_groups_are_warned_of_and_fewer_calibrate_nothing(
    run: MadeRun, tmp_path: Path, validation: tuple[int, int], test: tuple[int, int], warnings: list[str]
) -> None:
    table, out = table_of(run, classes=2), tmp_path / "head.safetensors"
    part = (np.arange(len(table.names)) % 3).astype(np.int8)
    split = RecordSplit(part=part, counts=(), validation_groups=validation, test_groups=test)
    run.folder.training.mkdir(exist_ok=True)
    fitted = fit_head(run.folder, table, split, settings_of(1000), out)
    assert all(re.search(part, whole) for part, whole in zip(warnings, split.warnings, strict=True))
    assert fitted.warnings[: len(warnings)] == split.warnings
    is_calibrated = fitted.trained.temperature is not None
    if min(validation) < LEAST_TO_CALIBRATE:
        assert not is_calibrated
    assert read_purpose(out).calibrated == is_calibrated
    figures = json.loads((run.folder.training / "figures.json").read_text())
    assert figures["warnings"] == list(fitted.warnings)
    assert is_calibrated == (not any(NOT_CALIBRATED in warning for warning in fitted.warnings))


def settings_of(most_frames: int) -> TrainerSettings:
    return TrainerSettings(epochs=2, most_frames=most_frames)


def test_runs_are_sampled_from_their_part_with_whole_chunks(run: MadeRun) -> None:
    store = run.store
    table = table_of(run, classes=3)
    numbers = np.arange(len(table.names))
    in_part, records = numbers % 5 != 0, record_of_frames(store)
    rng = np.random.default_rng(0)
    data = TrainingData(run.folder, run.plan, store, table, np.where(in_part, TRAIN, TEST).astype(np.int8))
    rows, everything = sample_runs(data, TRAIN, settings_of(10_000), rng, most_chunks=3)
    assert rows.tolist() == np.flatnonzero(in_part[records]).tolist()
    chunks = store.frame_chunk[rows]
    first = everything.first_row
    assert np.unique(chunks).tolist() == chunks[first[:-1]].tolist()
    assert first[-1] == len(chunks)
    assert np.diff(everything.first_chunk).max() == 3
    record_of_run = records[rows[first[everything.first_chunk[:-1]]]]
    for begin, end, record in zip(
        everything.first_chunk[:-1], everything.first_chunk[1:], record_of_run, strict=True
    ):
        assert set(records[rows[first[begin] : first[end]]].tolist()) == {record}
    assert everything.classes.tolist() == table.classes[record_of_run].tolist()
    assert everything.groups.tolist() == table.groups[record_of_run].tolist()
    assert everything.records.tolist() == record_of_run.tolist()
    assert everything.weights[everything.classes == 0].sum() == pytest.approx(0.5)
    found = [sample_runs(data, TRAIN, settings_of(20), rng, most_chunks=3) for _ in range(200)]
    assert np.mean([len(rows) for rows, _ in found]) == pytest.approx(20, rel=0.15)
    # In expectation, every record counts as in the whole.
    share = np.mean([np.bincount(one.groups, one.weights, len(numbers)) for _, one in found], axis=0)
    expected = np.bincount(everything.groups, everything.weights, len(numbers))
    np.testing.assert_allclose(share, expected, atol=0.05)
    assert everything.sizes.tolist() == store.sizes(rows).tolist()
