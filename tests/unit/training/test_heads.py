import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.made_models import MadeModels, MadeRun, plan_run, write_contigs
from virnuc_core.columns import Int64
from virnuc_core.errors import UsageError
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.models.catalogue import NOT_CALIBRATED, read_purpose
from virnuc_core.results.inspect import inspect_path
from virnuc_core.training.fit import LabelledVectors, TrainerSettings
from virnuc_core.training.heads import (
    LEAST_TO_CALIBRATE,
    RecordSplit,
    TrainingData,
    fit_head,
    read_samples,
    record_of_frames,
    sample_frames,
    sample_runs,
    split_labelled,
)
from virnuc_core.training.labels import RecordTable
from virnuc_core.training.split import TEST, TRAIN, VALIDATION


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


@pytest.mark.parametrize("of_validation", [slice(3, None, 7), slice(0)])
def test_features_are_those_of_the_shards(run: MadeRun, of_validation: slice) -> None:
    table, rows = table_of(run, classes=2), np.arange(run.store.num_frames)

    def sample(_data: object, part: int, *_: object) -> tuple[Int64, Callable[..., LabelledVectors]]:
        own = rows if part == TRAIN else rows[of_validation]
        return own, partial(LabelledVectors, is_viral=own > 0, weights=own / 1)

    data = TrainingData(run.folder, run.plan, run.store, table, np.zeros(len(table.names), np.int8))
    (whole, some), work = read_samples(data, settings_of(1000), sample)
    results = [result for _, result in iter_shard_results(run.folder, run.plan)]
    dna, protein = (np.concatenate([getattr(one, name) for one in results]) for name in ("dna", "protein"))
    np.testing.assert_array_equal(whole.features, np.concatenate([dna, protein], axis=1))
    np.testing.assert_array_equal(some.features, whole.features[of_validation])
    assert work.frames == run.store.num_frames


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
    return TrainerSettings(epochs=2, members=1, most_frames=most_frames)


def test_runs_are_sampled_from_their_part_with_whole_chunks(run: MadeRun) -> None:
    store = run.store
    table = table_of(run, classes=3)
    numbers = np.arange(len(table.names))
    in_part, records = numbers % 5 != 0, record_of_frames(store)
    rng = np.random.default_rng(0)
    data = TrainingData(run.folder, run.plan, store, table, np.where(in_part, TRAIN, TEST).astype(np.int8))
    rows, made = sample_runs(data, TRAIN, settings_of(10_000), rng, most_chunks=3)
    everything = made(features=np.zeros((len(rows), 1), np.float32))
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
    few = [made(features=np.zeros((len(rows), 1), np.float32)) for rows, made in found]
    assert np.mean([len(rows) for rows, _ in found]) == pytest.approx(20, rel=0.15)
    # In expectation, every record counts as in the whole.
    share = np.mean([np.bincount(one.groups, one.weights, len(numbers)) for one in few], axis=0)
    expected = np.bincount(everything.groups, everything.weights, len(numbers))
    np.testing.assert_allclose(share, expected, atol=0.05)
    assert everything.sizes.tolist() == store.sizes(rows).tolist()


def test_frames_are_sampled_from_their_part_and_counted(run: MadeRun) -> None:
    table, settings = table_of(run, classes=2), replace(settings_of(10_000), held_out=0.3)
    table = replace(table, groups=np.arange(len(table.names)))
    split, records = split_labelled(run.folder, table, settings), record_of_frames(run.store)
    data = TrainingData(run.folder, run.plan, run.store, table, split.part)
    rows, made = sample_frames(data, VALIDATION, settings, np.random.default_rng(0))
    sampled = made(features=np.zeros((len(rows), 1), np.float32))
    assert set(split.part[records[rows]].tolist()) == {VALIDATION}
    assert sampled.weights[sampled.is_viral].sum() == pytest.approx(0.5)
    np.testing.assert_array_equal(sampled.is_viral, table.is_viral[records[rows]])
    assert sum(one.frames for one in split.counts) == run.store.num_frames
    assert sum(one.records for one in split.counts) == len(np.unique(records))
    assert sum(one.frames for one in split.counts if one.part == "validation") == len(rows)
    both = [table.groups[records[rows]][table.is_viral[records[rows]] == kind] for kind in (True, False)]
    assert split.validation_groups == tuple(len(np.unique(groups)) for groups in both)
