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
from virnuc_core.inference.device import cpu_has_int8
from virnuc_core.models.checkpoint import build_model
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import Family, ResolvedPrecision

QUICK = ["--devices", "cpu", "--seconds", "0.05", "--repeats", "3", "--token-budget", "512"]


def test_settings_of_a_command_line() -> None:
    arguments = ["--model", "a", "--model", "b", "--devices", "0,1", "--end-to-end", "7.0", "--scaling"]
    assert parse([*arguments, "--out", "x.json"]).arguments() == arguments
    settings = parse(["--model", "a", "--precision", "fp16,fp8", "--lengths", "tokens:106,lognormal"])
    assert (settings.model, settings.precisions) == (("a",), ("fp16", "fp8"))
    assert settings.lengths_for("esm2") == (Lengths("tokens", 106), Lengths("lognormal"))
    defaults = parse(["--model", "a"])
    assert (defaults.precisions, defaults.devices) == (("auto",), "auto")
    assert (defaults.seconds, defaults.repeats, defaults.end_to_end) == (5.0, 3, None)
    assert list(map(str, defaults.lengths_for("dnabert_s"))) == ["fixed:500"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is given"),
        (["--model", "a", "--precision", "fp16,int4"], "--precision int4 is unknown"),
        (["--model", "a", "--seconds", "0"], "must be above 0"),
        (["--model", "a", "--repeats", "0"], "must be above 0"),
        (["--model", "a", "--scaling"], "--end-to-end S as well"),
        (["--model", "a", "--end-to-end", "5", "--lengths", "tokens:106"], "give fixed:N"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(arguments)


@pytest.mark.parametrize("text", ["fixed", "fixed:", "fixed:2", "fixed:-9", "lognormal:3", "uniform:5", ""])
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
    spec = checkpoint.spec
    made = random_tokens(spec, np.array([20, 8]), rng)
    tokenizer = Esm2Tokenizer() if family == "esm2" else checkpoint.tokenizer
    assert made.num_tokens.tolist() == [20, 8]
    for tokens in (made, tokenizer.encode(random_sequences(family, np.array([50, 90]), rng))):
        ends = np.concatenate((tokens.offsets[:-1], tokens.offsets[1:] - 1))
        assert tokens.input_ids[ends].tolist() == ([0, 0, 2, 2] if family == "esm2" else [1, 1, 2, 2])
        inside = np.delete(tokens.input_ids, ends)
        assert inside.min() >= 4
        assert inside.max() < (24 if family == "esm2" else spec.vocab_size)


def test_lognormal_lengths_are_like_those_of_proteins() -> None:
    drawn = draw_lengths(Lengths("lognormal"), 20_000, np.random.default_rng(0))
    assert (drawn.min(), drawn.max()) == (30, 1022)
    assert 320 < drawn.mean() < 350


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_the_floor_has_the_products_of_all_layers(family: Family) -> None:
    spec = open_checkpoint("random:tiny", family).spec
    layer = build_model(spec).layers[0]
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    shapes = sorted((module.in_features, module.out_features) for module in linears)
    assert shapes == sorted(gemm_shapes(spec))
    precisions: list[ResolvedPrecision] = ["fp32", "int8"] if cpu_has_int8() else ["fp32"]
    for precision in precisions:
        floor = gemm_floor(spec, precision, 16, "cpu")
        with torch.profiler.profile() as profile:
            floor()
        products = [event for event in profile.events() if "linear" in event.name]
        assert len(products) == len(shapes) * spec.num_layers


def test_whole_rounds_are_counted() -> None:
    done: list[int] = []
    rate = rounds_per_second([lambda: done.append(1), lambda: done.append(2)], 0.01, "cpu")
    assert done == [1, 2] * (len(done) // 2)
    assert 0 < rate <= len(done) / 2 / 0.01


def test_groups_of_devices() -> None:
    devices = tuple(f"cuda:{i}" for i in range(6))
    assert device_groups(devices, scaling=False) == [devices]
    assert list(map(len, device_groups(devices, scaling=True))) == [1, 2, 4, 6]
    assert device_groups(devices[:1], scaling=True) == [("cuda:0",)]


@pytest.mark.slow
def test_forward_passes_against_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    models = ["--model", "esm2:random:tiny", "--model", "dnabert:random:tiny"]
    assert main([*models, *QUICK, "--lengths", "fixed:60,tokens:20", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["kind"] == "bench"
    assert result["command"].startswith("python -m virnuc_core.benchmark --model esm2:random:tiny")
    assert {"torch", "virnuc", "device"} <= set(result["machine"])
    measured = [(case["family"], case["lengths"]) for case in result["cases"]]
    assert measured == [(f, n) for f in ("esm2", "dnabert_s") for n in ("fixed:60", "tokens:20")]
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
    speed, forward = run["speed"], case["forward"]
    assert run["devices"] == ["cpu"]
    assert run["load_seconds"] > 0
    assert run["over_gpu_only"] == pytest.approx(speed["tokens_per_second"] / forward["tokens_per_second"])
    assert speed["letters_per_second"] == pytest.approx(166 * speed["sequences_per_second"])
