"""The command line is an interface: its commands, flags and exit codes change on purpose only."""

import click
import pytest

from virnuc_cli.config_file import iter_commands
from virnuc_cli.main import cli, main
from virnuc_core import __version__

OUTPUT = ["--quiet", "--json", "--debug"]
ENGINE = [
    "--repr-layer",
    "--precision",
    "--devices",
    "--token-budget",
    "--engine",
    "--attention",
    "--compile-mode",
    "--shard-seconds",
    "--force",
]
LANES = ["--mode", "--lane-minutes"]
LABELLED = ["--viral", "--other", "--genbank", "--labels"]
FLAGS = {
    "predict": [
        "--out",
        "--chunk-length",
        "--min-length",
        "--threshold",
        "--preset",
        "--esm-model",
        "--dnabert-model",
        "--head",
        "--dna-head",
        "--dnabert-precision",
        "--dnabert-engine",
        "--embeddings",
        *ENGINE,
        *LANES,
        *OUTPUT,
    ],
    "train": [
        *LABELLED,
        "--out",
        "--chunk-length",
        "--esm-model",
        "--dnabert-model",
        "--dnabert-precision",
        "--dnabert-engine",
        "--dna-alone",
        "--groups",
        "--seed",
        "--held-out",
        "--group-power",
        "--most-frames",
        "--epochs",
        "--members",
        *ENGINE,
        *LANES,
        *OUTPUT,
    ],
    "evaluate": [
        *LABELLED,
        "--out",
        "--chunk-length",
        "--min-length",
        "--threshold",
        "--preset",
        "--esm-model",
        "--dnabert-model",
        "--head",
        "--dna-head",
        "--dnabert-precision",
        "--dnabert-engine",
        "--embeddings",
        *ENGINE,
        *LANES,
        *OUTPUT,
    ],
    "reprocess": [
        "--esm-model",
        "--dnabert-model",
        "--head",
        "--dna-head",
        "--repr-layer",
        "--precision",
        "--dnabert-precision",
        "--token-budget",
        "--engine",
        "--dnabert-engine",
        "--attention",
        "--compile-mode",
        "--embeddings",
        "--devices",
        "--force",
        *LANES,
        *OUTPUT,
    ],
    "embed": ["--out", "--model", "--embeddings", *ENGINE, *LANES, *OUTPUT],
    "frames": ["--chunk-length", "--out", *OUTPUT],
    "score": ["--head", "--dna-head", "--out", *OUTPUT],
    "export": ["--to", "--vectors", *OUTPUT],
    "inspect": OUTPUT,
    "report": ["--labels", *OUTPUT],
    "fsck": OUTPUT,
    "bench": [
        "--model",
        "--precision",
        "--lengths",
        "--devices",
        "--token-budget",
        "--attention",
        "--compile-mode",
        "--seconds",
        "--repeats",
        "--end-to-end",
        "--scaling",
        "--out",
        *OUTPUT,
    ],
    "deploy": [
        "--cron",
        "--timezone",
        "--inbox",
        "--out",
        "--preset",
        "--chunk-length",
        "--esm-model",
        "--dnabert-model",
        "--head",
        "--dna-head",
        *OUTPUT,
    ],
    "worker": ["--devices", "--workers", "--runs", "--debug"],
    "up": ["--devices", "--workers", "--port", "--mlflow-port", "--debug"],
    "models list": OUTPUT,
    "models pull": ["--to", *OUTPUT],
    "models verify": OUTPUT,
    "models convert": ["--out", *OUTPUT],
    "doctor": ["--quick", "--compare", *OUTPUT],
    "config show": OUTPUT,
}


def test_commands_and_flags_are_frozen() -> None:
    found = {
        " ".join(path): [
            option.opts[0]
            for option in command.params
            if isinstance(option, click.Option) and option.name != "help"
        ]
        for path, command in iter_commands(cli)
    }
    assert found == FLAGS


def test_choices_are_frozen() -> None:
    choices = {
        option.name: list(option.type.choices)
        for option in cli.commands["predict"].params
        if isinstance(option.type, click.Choice)
    }
    assert choices == {
        "preset": ["tiny", "virnucpro-500", "virnucpro-300"],
        "dnabert_precision": ["auto", "fp32", "fp16", "bf16", "fp8"],
        "dnabert_engine": ["packed", "reference"],
        "precision": ["auto", "fp32", "fp16", "bf16", "fp8"],
        "engine": ["packed", "reference"],
        "attention": ["auto", "triton", "flash-attn", "varlen", "sdpa", "reference"],
        "compile_mode": ["auto", "none", "default", "reduce-overhead", "max-autotune"],
        "embeddings": ["none", "float16", "float32"],
        "mode": ["local", "pool"],
    }


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([*name.split(), "--help"] for name in FLAGS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: virnuc" in capsys.readouterr().out


@pytest.mark.parametrize("group", [[], ["models"], ["config"]])
def test_a_group_without_a_command_shows_its_help(
    group: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(group) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"Usage: {' '.join(['virnuc', *group])} [OPTIONS] COMMAND")
    assert "error" not in err


@pytest.mark.parametrize("group", [cli, cli.commands["models"], cli.commands["config"]], ids=lambda g: g.name)
def test_the_list_of_commands_has_whole_sentences(group: click.Group) -> None:
    with click.Context(group, info_name="virnuc") as ctx:
        shown = " ".join(group.get_help(ctx).split())
    assert "..." not in shown.partition("Commands:")[2]
    for name, command in group.commands.items():
        first = " ".join((command.help or "").partition("\n\n")[0].split())
        assert f" {name} {first}" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_usage_error_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "a.h5", "--json"]) == 2
    out, err = capsys.readouterr()
    assert '"exit_code": 2' in out
    assert "--head" in err
