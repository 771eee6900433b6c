"""The benchmark of attention kernels, as far as a CPU can run it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import flash_attention
from benchmarks.flash_attention import SHAPES, attention_rows, bounds_of, forward_rows

SMALL = replace(SHAPES[0], heads=2, head_dim=8)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.model} {shape.lengths}")
def test_batches_are_full_and_have_the_lengths_asked_for(shape: flash_attention.Shape) -> None:
    bounds = bounds_of(shape, 20_000)
    lengths = np.diff(bounds)
    assert bounds[0] == 0
    assert 20_000 - 1024 < bounds[-1] <= 20_000
    kind, _, number = shape.lengths.partition(":")
    if kind == "lognormal":
        assert lengths.min() < 150 < 400 < lengths.max()
    else:
        assert set(lengths) == {int(number) + (2 if kind == "fixed" else 0)}


def test_what_a_candidate_cannot_do_is_recorded_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_TOKENS", 500)
    rows = {row["candidate"]: row for row in attention_rows(SMALL, "bf16", 0.001, "cpu")}
    assert list(rows) == ["triton", "flash-attn-4", "torch varlen", "fa3-fwd"]
    assert rows["triton"]["failed"].startswith("DeviceError: --attention triton needs a CUDA device")
    assert "fa3_fwd_interface" in rows["fa3-fwd"]["failed"]
    assert not any("as_called" in row for row in rows.values())


def test_attention_is_measured_with_and_without_the_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_TOKENS", 500)
    monkeypatch.setattr(flash_attention, "BACKENDS", {"plain": "reference"})
    plain, _ = attention_rows(SMALL, "fp16", 0.001, "cpu")
    assert plain["relative_error"] < 1e-3
    for figure in ("as_called", "without_rotation"):
        assert len(plain[figure]["repeats"]) == 5
        assert min(plain[figure]["repeats"]) <= plain[figure]["ms"] <= max(plain[figure]["repeats"])


@pytest.mark.slow
def test_backends_take_turns_on_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_FORWARD_TOKENS", 512)
    monkeypatch.setattr(flash_attention, "BACKENDS", {"plain": "sdpa", "triton": "triton"})
    rows = list(forward_rows("8M", "fp32", 0.001, "cpu"))
    assert [(row["candidate"], row["lengths"], "failed" in row) for row in rows] == [
        *(("triton", "fixed:166", True), ("plain", "fixed:166", False)),
        *(("triton", "lognormal", True), ("plain", "lognormal", False)),
    ]
    assert all(len(row["repeats"]) == 3 for row in rows if "repeats" in row)
