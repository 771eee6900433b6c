"""A shard is written whole, and no change of it goes unnoticed."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.shard_file import (
    ModelCounters,
    ModelIdentity,
    ShardCounters,
    ShardIdentity,
    ShardResult,
    read_identity,
    read_shard,
    set_aside,
    sum_counters,
    write_shard,
)

MODEL = ModelIdentity(
    name="tiny",
    family="esm2",
    weights_fingerprint="a" * 64,
    num_layers=4,
    repr_layer=3,
    embedding_dim=5,
    precision="fp32",
    token_budget=100,
)
IDENTITY = ShardIdentity(
    plan_fingerprint="b" * 64,
    index=3,
    begin=10,
    end=14,
    models=(MODEL,),
    head_fingerprint="c" * 64,
    embeddings="float32",
    virnuc_version="1.0",
)
COUNTERS = ShardCounters(
    frames=4,
    residues=40,
    bases=120,
    models=(
        ModelCounters(
            name="tiny", family="esm2", sequences=3, tokens=48, batches=2, capacity=64, fp32_batches=1
        ),
    ),
)
RANDOM = np.random.default_rng(0)
RESULT = ShardResult(
    dna=RANDOM.standard_normal((4, 6), np.float32),
    protein=RANDOM.standard_normal((4, 5), np.float32),
    scores=RANDOM.random((4, 2), np.float32),
    counters=COUNTERS,
)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard_00003.h5"
    write_shard(path, RESULT, IDENTITY)
    return path


def assert_equal(left: ShardResult, right: ShardResult) -> None:
    for name in ("dna", "protein", "scores"):
        a, b = getattr(left, name), getattr(right, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert left.counters == right.counters


def test_it_reads_back_equal(shard: Path) -> None:
    assert_equal(read_shard(shard, IDENTITY), RESULT)
    assert read_identity(shard) == IDENTITY


@pytest.mark.parametrize("missing", ["dna", "protein", "scores"])
def test_parts_may_be_absent(tmp_path: Path, missing: str) -> None:
    result = replace(RESULT, **{missing: None})
    write_shard(tmp_path / "shard.h5", result, IDENTITY)
    assert_equal(read_shard(tmp_path / "shard.h5", IDENTITY), result)


def test_half_precision_vectors(tmp_path: Path) -> None:
    assert RESULT.dna is not None
    result = replace(RESULT, dna=RESULT.dna.astype(np.float16))
    write_shard(tmp_path / "shard.h5", result, IDENTITY)
    assert_equal(read_shard(tmp_path / "shard.h5", IDENTITY), result)


def test_the_same_shard_is_the_same_file(shard: Path, tmp_path: Path) -> None:
    time.sleep(1.1)  # longer than the resolution of times in HDF5
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
        assert_equal(result, RESULT)  # a byte that holds nothing


@pytest.mark.parametrize("size", [0, 1, 100, 1000, -1])
def test_a_truncated_file_is_damaged(shard: Path, size: int) -> None:
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(DamagedFileError, match=r"shard_00003\.h5 is not whole"):
        read_shard(shard, IDENTITY)


def test_a_missing_file_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError):
        read_shard(tmp_path / "shard_00000.h5", IDENTITY)
    with pytest.raises(DamagedFileError):
        read_identity(tmp_path / "shard_00000.h5")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("plan_fingerprint", "f" * 64),
        ("begin", 9),
        ("virnuc_version", "2.0"),
    ],
)
def test_a_shard_of_another_run_is_refused(shard: Path, field: str, value: object) -> None:
    with pytest.raises(MismatchError, match=f"{field} is .* in the file and {value} in the plan.*--force"):
        read_shard(shard, replace(IDENTITY, **{"plan_fingerprint": "e" * 64, field: value}))


@pytest.mark.parametrize(
    ("field", "value"), [("weights_fingerprint", "0" * 64), ("num_layers", 36), ("precision", "fp16")]
)
def test_a_shard_of_another_model_is_refused(shard: Path, field: str, value: object) -> None:
    other = replace(IDENTITY, plan_fingerprint="e" * 64, models=(replace(MODEL, **{field: value}),))
    with pytest.raises(MismatchError, match=rf"esm2\.{field} is .* in the file and {value} in the plan"):
        read_shard(shard, other)


def test_set_aside_never_overwrites(shard: Path) -> None:
    names = [set_aside(shard).name]
    shard.touch()
    names.append(set_aside(shard).name)
    assert names == ["shard_00003.h5.damaged-1", "shard_00003.h5.damaged-2"]
    assert not shard.exists()


def test_sum_counters() -> None:
    total = sum_counters([COUNTERS, COUNTERS])
    assert (total.frames, total.residues, total.bases) == (8, 80, 240)
    assert total.models == (
        ModelCounters(
            name="tiny", family="esm2", sequences=6, tokens=96, batches=4, capacity=128, fp32_batches=2
        ),
    )
    assert total.models[0].packing_efficiency == 0.75
    nothing = sum_counters([])
    assert (nothing.frames, nothing.models) == (0, ())
