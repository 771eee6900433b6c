"""Shards are written atomically, every change of one is detected, and only intact ones of this run are kept."""

import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.made_models import MadeRun, copy_of
from tests.made_plans import PLAN
from virnuc_core import __version__
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.shard import (
    ModelCounters,
    ShardCounters,
    ShardResult,
    missing_shards,
    pending_shards,
    quarantine_file,
    read_identity,
    read_shard,
    shard_identity,
    sum_counters,
    write_shard,
)
from virnuc_core.run_folder import RunFolder

IDENTITY = shard_identity(PLAN, PLAN.shards[1])
WORK = ModelCounters(
    name="tiny", family="esm2", sequences=3, tokens=48, batches=2, capacity=64, fp32_batches=1
)
RANDOM = np.random.default_rng(0)
RESULT = ShardResult(
    dna=RANDOM.standard_normal((2, 8), np.float32),
    protein=RANDOM.standard_normal((2, 8), np.float32),
    scores=RANDOM.random((2, 2), np.float32),
    counters=ShardCounters(frames=2, residues=40, bases=120, models=(WORK,)),
)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard_00001.h5"
    write_shard(path, RESULT, IDENTITY)
    return path


def assert_equal(left: ShardResult, right: ShardResult) -> None:
    for name in ("dna", "protein", "scores"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), strict=True)
    assert left.counters == right.counters


@pytest.mark.parametrize(
    "changes",
    [{}, {"dna": None}, {"protein": None}, {"scores": None}, {"dna": RESULT.dna.astype(np.float16)}],
    ids=["all", "no DNA", "no protein", "no scores", "float16"],
)
def test_it_reads_back_equal(tmp_path: Path, changes: dict[str, np.ndarray | None]) -> None:
    result = replace(RESULT, **changes)
    write_shard(tmp_path / "shard.h5", result, IDENTITY)
    assert_equal(read_shard(tmp_path / "shard.h5", IDENTITY), result)
    assert read_identity(tmp_path / "shard.h5") == {**IDENTITY, "virnuc_version": __version__}


def test_the_same_shard_is_the_same_file(shard: Path, tmp_path: Path) -> None:
    time.sleep(1.1)  # longer than HDF5's time resolution
    write_shard(tmp_path / "again.h5", RESULT, IDENTITY)
    assert shard.read_bytes() == (tmp_path / "again.h5").read_bytes()


def test_no_flipped_byte_goes_unnoticed(shard: Path) -> None:
    content = shard.read_bytes()
    for position in np.random.default_rng(1).choice(len(content), 300, replace=False).tolist():
        flipped = bytearray(content)
        flipped[position] ^= 0x41
        shard.write_bytes(flipped)
        try:
            result = read_shard(shard, IDENTITY)
        except (DamagedFileError, MismatchError):
            continue
        assert_equal(result, RESULT)  # an unused byte


@pytest.mark.parametrize("size", [None, 0, 100, 1000, -1])
def test_a_truncated_or_missing_file_is_damaged(shard: Path, size: int | None) -> None:
    content = shard.read_bytes()
    shard.unlink()
    if size is not None:
        shard.write_bytes(content[:size])
    with pytest.raises(DamagedFileError, match=r"shard_00001\.h5 is corrupt"):
        read_shard(shard, IDENTITY)
    with pytest.raises(DamagedFileError):
        read_identity(shard)


@pytest.mark.parametrize("name", ["plan_fingerprint", "index", "begin", "end"])
def test_a_shard_of_another_run_is_refused(shard: Path, name: str) -> None:
    message = f"belongs to another run: {name} is {IDENTITY[name]} in the file and 99 in the plan.*--force"
    with pytest.raises(MismatchError, match=message):
        read_shard(shard, {**IDENTITY, name: 99})


def test_quarantine_never_overwrites(shard: Path) -> None:
    names = [quarantine_file(shard).name]
    shard.touch()
    names.append(quarantine_file(shard).name)
    assert names == ["shard_00001.h5.damaged-1", "shard_00001.h5.damaged-2"]
    assert not shard.exists()


def test_counters_are_summed() -> None:
    doubled = replace(WORK, sequences=6, tokens=96, batches=4, capacity=128, fp32_batches=2)
    total = ShardCounters(frames=4, residues=80, bases=240, models=(doubled,))
    assert sum_counters([RESULT.counters] * 2) == total
    assert doubled.packing_efficiency == 0.75
    assert sum_counters([]) == ShardCounters(frames=0, residues=0, bases=0, models=())


def test_what_is_missing_damaged_or_of_another_run_is_pending_and_nothing_else(
    finished_run: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = copy_of(finished_run, tmp_path / "run")
    assert pending_shards(run.folder, run.plan) == ()
    missing, damaged, foreign = (run.folder.shard(index) for index in range(3))
    missing.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-100])
    write_shard(foreign, RESULT, shard_identity(replace(run.plan, virnuc_version="0"), run.plan.shards[2]))
    with caplog.at_level(logging.WARNING):
        assert pending_shards(run.folder, run.plan) == (0, 1, 2)
    for path in (damaged, foreign):
        assert f"Moved to {path.name}.damaged-1" in caplog.text
        assert not path.exists()
    assert missing_shards(run.folder, (0, 1, 2, 4)) == (0, 1, 2, 4)
    assert missing_shards(finished_run.folder, (0, 1, 2, 4)) == (4,)
    assert missing_shards(RunFolder(tmp_path / "nowhere"), (3, 1)) == (3, 1)
