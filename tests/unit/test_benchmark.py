"""`virnuc bench`: its settings, and measurements of the smallest models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from virnuc_cli.main import main as virnuc
from virnuc_core.batching.tokenizers import Esm2Tokenizer
from virnuc_core.benchmark.__main__ import main, parse
from virnuc_core.benchmark.forward import gemm_floor, gemm_shapes, rounds_per_second
from virnuc_core.benchmark.run import device_groups
from virnuc_core.benchmark.settings import Lengths
from virnuc_core.benchmark.synthetic import draw_lengths, random_sequences, random_tokens
from virnuc_core.errors import UsageError
from virnuc_core.models.checkpoint import build_model
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import Family

QUICK = ["--devices", "cpu", "--seconds", "0.05", "--repeats", "3", "--token-budget", "512"]


def test_the_command_line_is_given_back() -> None:
    arguments = [
        "--model",
        "a",
        "--model",
        "b",
        "--precision",
        "fp16,fp8",
        "--lengths",
        "tokens:106,lognormal",
    ]
    settings = parse([*arguments, "--out", "x.json"])
    assert (settings.model, settings.precisions) == (("a", "b"), ("fp16", "fp8"))
    assert settings.lengths_for("esm2") == (Lengths("tokens", 106), Lengths("lognormal"))
    assert settings.arguments() == arguments
    flags = ["--model", "a", "--devices", "0,1", "--end-to-end", "7.0", "--scaling"]
    assert parse(flags).arguments() == flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is given"),
        (["--model", "a", "--precision", "fp16,int8"], "--precision int8 is unknown"),
        (["--model", "a", "--seconds", "0"], "must be above 0"),
        (["--model", "a", "--scaling"], "--end-to-end S as well"),
        (["--model", "a", "--end-to-end", "5", "--lengths", "tokens:106"], "give fixed:N"),
    ],
)
def test_contradictions_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(arguments)


@pytest.mark.parametrize("text", ["fixed:", "fixed:2", "fixed:-9", "lognormal:3", "uniform:5", ""])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--lengths"):
        Lengths.parse(text)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "random:nonsense", *QUICK]) == 4
    assert "random:nonsense" in capsys.readouterr().err
    assert main(["--model", "a", "--token-budget", "many"]) == 2
    assert "many" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_random_tokens_are_like_tokenized_sequences(family: Family) -> None:
    rng = np.random.default_rng(0)
    checkpoint = open_checkpoint("random:tiny", family)
    made = random_tokens(checkpoint.spec, np.array([20, 8]), rng)
    tokenizer = Esm2Tokenizer() if family == "esm2" else checkpoint.tokenizer
    assert made.num_tokens.tolist() == [20, 8]
    for tokens in (made, tokenizer.encode(random_sequences(family, np.array([50, 90]), rng))):
        ends = np.concatenate((tokens.offsets[:-1], tokens.offsets[1:] - 1))
        assert tokens.input_ids[ends].tolist() == ([0, 0, 2, 2] if family == "esm2" else [1, 1, 2, 2])
        inside = np.delete(tokens.input_ids, ends)
        assert inside.min() >= 4
        assert inside.max() < (24 if family == "esm2" else checkpoint.spec.vocab_size)


def test_lognormal_lengths_are_like_those_of_proteins() -> None:
    drawn = draw_lengths(Lengths("lognormal"), 20_000, np.random.default_rng(0))
    assert (drawn.min(), drawn.max()) == (30, 1022)
    assert 320 < drawn.mean() < 350


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_the_floor_has_the_products_of_all_layers(family: Family) -> None:
    spec = open_checkpoint("random:tiny", family).spec
    modules = build_model(spec).layers[0].modules()
    shapes = [(one.in_features, one.out_features) for one in modules if isinstance(one, torch.nn.Linear)]
    assert sorted(shapes) == sorted(gemm_shapes(spec))
    floor = gemm_floor(spec, "fp32", 16, "cpu")
    with torch.profiler.profile() as profile:
        floor()
    products = [event for event in profile.events() if "linear" in event.name]
    assert len(products) == len(shapes) * spec.num_layers


def test_complete_rounds_are_counted() -> None:
    done: list[int] = []
    rate = rounds_per_second([lambda: done.append(1), lambda: done.append(2)], 0.01, "cpu")
    assert done == [1, 2] * (len(done) // 2)
    assert 0 < rate <= len(done) / 2 / 0.01


def test_groups_of_devices() -> None:
    devices = tuple(f"cuda:{i}" for i in range(6))
    assert device_groups(devices, scaling=False) == [devices]
    assert list(map(len, device_groups(devices, scaling=True))) == [1, 2, 4, 6]
    assert device_groups(devices[:1], scaling=True) == [("cuda:0",)]


def test_forward_passes_end_to_end_and_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model",
        "esm2:tiny",
        *QUICK,
        "--end-to-end",
        "0.5",
        "--out",
        str(tmp_path / "result.json"),
    ]
    assert virnuc(["bench", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["command"].startswith("virnuc bench --model esm2:tiny --devices cpu")
    assert {"torch", "virnuc", "device"} <= set(result["machine"])
    [case] = result["cases"]
    [run] = case["end_to_end"]
    forward, speed = case["forward"], run["speed"]
    assert sorted(forward["repeats"])[1] == forward["tokens_per_second"]
    assert case["over_floor"] == forward["tokens_per_second"] / case["floor_tokens_per_second"]
    assert 0.5 < forward["packing_efficiency"] <= 1
    assert forward["tokens_per_second"] == pytest.approx(168 * forward["sequences_per_second"])
    for measured in (forward, speed):
        assert measured["letters_per_second"] == pytest.approx(166 * measured["sequences_per_second"])
    assert (run["devices"], run["over_linear"]) == (["cpu"], None)
    assert run["load_seconds"] > 0
    assert run["over_gpu_only"] == pytest.approx(speed["tokens_per_second"] / forward["tokens_per_second"])


@pytest.mark.slow
def test_each_model_with_each_distribution_of_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", "esm2:random:tiny", "--model", "dnabert:random:tiny"]
    assert main([*models, *QUICK, "--lengths", "fixed:60,tokens:20"]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[:3] == ["model", "precision", "lengths"]
    assert [row[2] for row in rows] == ["fixed:60", "tokens:20"] * 2
    assert all("floor" in row for row in rows)
