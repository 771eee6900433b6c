"""The benchmark of attention kernels, as far as a CPU can run it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import flash_attention
from benchmarks.flash_attention import SHAPES, attention_rows, bounds_of, forward_rows

SMALL = replace(SHAPES[0], heads=2, head_dim=8)


def test_batches_are_full_and_have_the_lengths_asked_for() -> None:
    for shape, lengths in zip(SHAPES, ({168}, None, {168}, None, {106}), strict=True):
        bounds = bounds_of(shape, 20_000)
        assert 20_000 - 1024 < bounds[-1] <= 20_000
        assert lengths is None or set(np.diff(bounds)) == lengths


def test_what_a_candidate_cannot_do_is_recorded_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_TOKENS", 500)
    monkeypatch.setattr(flash_attention, "BACKENDS", {"plain": "reference", "triton": "triton"})
    plain, triton, fa3 = attention_rows(SMALL, "fp16", 0.001, "cpu")
    assert triton["failed"].startswith("DeviceError: --attention triton needs a CUDA device")
    assert "fa3_fwd_interface" in fa3["failed"]
    assert plain["relative_error"] < 1e-3
    for name in ("as_called", "without_rotation"):
        assert len(plain[name]["repeats"]) == 5
        assert min(plain[name]["repeats"]) <= plain[name]["ms"] <= max(plain[name]["repeats"])


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
