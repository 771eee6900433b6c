"""Where settings come from, and which source wins."""

from pathlib import Path

import pytest

from virnuc_cli.main import cli, main
from virnuc_cli.options import iter_commands
from virnuc_cli.sources import COMMANDS, reading
from virnuc_core.env_config import available_threads
from virnuc_core.settings import EmbedSettings, PredictSettings, predict_config


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flag_then_variable_then_file_then_preset_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("virnuc.toml").write_text(
        "precision = 'fp32'\ntoken_budget = 4096\nshard-seconds = 3\nesm-model = '8M'\nepochs = 3\n"
    )
    monkeypatch.setenv("VIRNUC_PRECISION", "bf16")
    monkeypatch.setenv("VIRNUC_TOKEN_BUDGET", "2048")
    monkeypatch.setenv("VIRNUC_DEVICES", "0,1")
    monkeypatch.setenv("VIRNUC_HEAD", "")
    with reading(PredictSettings, {"precision": "fp16", "preset": "virnucpro-300"}) as settings:
        assert settings == PredictSettings(
            precision="fp16", token_budget=2048, devices=("0", "1"), shard_seconds=3.0, esm_model="8M",
            preset="virnucpro-300",
        )  # fmt: skip
    config = predict_config(settings)
    assert (config.esm_model, config.dnabert_model, config.chunk_length) == ("8M", "DNABERT-S", 300)
    with reading(EmbedSettings, {}) as embed:
        assert (embed.precision, embed.attention) == ("bf16", "auto")


def test_threads_are_those_of_the_process_while_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = available_threads()
    Path("virnuc.toml").write_text("threads = 3\n")
    for flags, variable, threads in (({}, None, 3), ({}, "5", 5), ({"threads": "7"}, "5", 7)):
        if variable:
            monkeypatch.setenv("VIRNUC_THREADS", variable)
        with reading(EmbedSettings, flags):
            assert available_threads() == threads
    monkeypatch.delenv("VIRNUC_THREADS")
    assert available_threads() == before


def test_a_setting_has_one_name_and_every_class_of_a_command_is_known_to_the_file() -> None:
    known = {kind.__name__: kind for kind in COMMANDS}
    for name, command in iter_commands(cli):
        options = {param.name: param.opts for param in command.params}
        for model in getattr(command, "models", ()):
            for field in known[model].model_fields:
                assert f"--{field.replace('_', '-')}" in options[field], name


def test_help_needs_no_readable_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("virnuc.toml").write_text("[predict\n")
    assert main(["predict", "--help"]) == 0
    few = capsys.readouterr().out
    assert main(["predict", "--help-all"]) == 0
    every = capsys.readouterr().out
    assert "--token-budget" in every
    assert "--token-budget" not in few
    assert main(["predict", "-h"]) == 0
    assert capsys.readouterr().out == few
