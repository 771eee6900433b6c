"""Whole benchmarks of the smallest models."""

import json
from pathlib import Path

import pytest

from virnuc_cli.main import main as virnuc
from virnuc_core.benchmark.__main__ import main
from virnuc_core.benchmark.end_to_end import device_groups

QUICK = ["--devices", "cpu", "--seconds", "0.05", "--repeats", "3", "--token-budget", "512"]


@pytest.mark.slow
def test_forward_passes_against_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    models = ["--model", "esm2:random:tiny", "--model", "dnabert:random:tiny"]
    assert main([*models, *QUICK, "--lengths", "fixed:60,tokens:20", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["kind"] == "bench"
    assert result["command"].startswith("python -m virnuc_core.benchmark --model esm2:random:tiny")
    assert {"torch", "virnuc", "device"} <= set(result["machine"])
    assert [(case["family"], case["lengths"]) for case in result["cases"]] == [
        ("esm2", "fixed:60"),
        ("esm2", "tokens:20"),
        ("dnabert_s", "fixed:60"),
        ("dnabert_s", "tokens:20"),
    ]
    for case in result["cases"]:
        forward = case["forward"]
        assert sorted(forward["repeats"])[1] == forward["tokens_per_second"]
        assert case["over_floor"] == forward["tokens_per_second"] / case["floor_tokens_per_second"]
        assert 0.5 < forward["packing_efficiency"] <= 1
        assert case["end_to_end"] == []
    protein = result["cases"][0]["forward"]
    assert protein["letters_per_second"] == pytest.approx(60 * protein["sequences_per_second"])
    assert protein["tokens_per_second"] == pytest.approx(62 * protein["sequences_per_second"])
    assert result["cases"][1]["forward"]["letters_per_second"] is None
    assert "floor" in capsys.readouterr().out


def test_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "esm2:tiny", *QUICK, "--repeats", "1", "--end-to-end", "0.5", "--json"]
    assert virnuc(["bench", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"].startswith("virnuc bench --model esm2:tiny --devices cpu")
    [case] = result["cases"]
    [run] = case["end_to_end"]
    speed = run["speed"]
    assert run["devices"] == ["cpu"]
    assert run["load_seconds"] > 0
    assert run["over_gpu_only"] == pytest.approx(
        speed["tokens_per_second"] / case["forward"]["tokens_per_second"]
    )
    assert speed["letters_per_second"] == pytest.approx(166 * speed["sequences_per_second"])


def test_groups_of_devices() -> None:
    devices = tuple(f"cuda:{i}" for i in range(6))
    assert device_groups(devices, scaling=False) == [devices]
    assert list(map(len, device_groups(devices, scaling=True))) == [1, 2, 4, 6]
    assert device_groups(devices[:1], scaling=True) == [("cuda:0",)]


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "random:nonsense", *QUICK]) == 4
    assert "random:nonsense" in capsys.readouterr().err
