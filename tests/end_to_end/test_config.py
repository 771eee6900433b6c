"""Settings from flags, variables, files, presets and defaults."""

from pathlib import Path

import pytest

from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels

FILE = """
[defaults]
precision = "fp32"
devices = "cpu"
[predict]
token-budget = 4096
attention = "sdpa"
engine = "reference"
[frames]
chunk-length = 300
out = "from_file.tsv"
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def test_every_source_and_which_of_them_wins(
    virnuc: CommandLine, models: MadeModels, contigs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("virnuc.toml").write_text(FILE)
    monkeypatch.setenv("VIRNUC_PREDICT_ATTENTION", "reference")
    monkeypatch.setenv("VIRNUC_PREDICT_ENGINE", "reference")
    given = ("--engine", "packed", "--chunk-length", 500, *models.flags)
    document = virnuc.done("predict", contigs, "--out", "run", *given, "--json").document
    expected = {
        "engine": "flag --engine",
        "attention": "environment variable VIRNUC_PREDICT_ATTENTION",
        "token-budget": "virnuc.toml [predict]",
        "precision": "virnuc.toml [defaults]",
    }
    assert {**document["settings_from"], **expected} == document["settings_from"]
    assert "embeddings" not in document["settings_from"]
    esm2 = document["models"][1]
    assert (esm2["engine"], esm2["attention"], esm2["token_budget"]) == ("packed", "reference", 4096)


def test_variables_of_a_file_that_is_named(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.toml").write_text("[environment]\nVIRNUC_LANE_TIMEOUT = 'much'\n")
    message = "mine.toml [environment]: environment variable VIRNUC_LANE_TIMEOUT is 'much'"
    virnuc.refused(2, message, "--config", "mine.toml", "predict", "a.fa", "--out", "out")
    monkeypatch.setenv("VIRNUC_PREDICT_TOKEN_BUDGET", "many")
    error = virnuc.refused(2, "'many' is not a valid integer", "predict", "a.fa", "--out", "out")
    assert "environment variable VIRNUC_PREDICT_TOKEN_BUDGET: " in error
    virnuc.refused(2, "no settings file absent.toml", "--config", "absent.toml", "frames", "a.fa")
    virnuc.refused(2, "--config stands before the command", "frames", "--config", "a.toml")


def test_help_works_with_a_broken_file(virnuc: CommandLine) -> None:
    Path("virnuc.toml").write_text("[predict\n")
    virnuc.done("predict", "--help")
    result = virnuc("frames", "a.fa", "--chunk-length", "300", "--out", "b.tsv", "--json")
    assert result.code == 2
    assert "virnuc.toml is not TOML" in result.document["error"]


def test_a_command_does_what_the_file_says(virnuc: CommandLine, contigs: Path) -> None:
    Path("virnuc.toml").write_text(FILE)
    virnuc.done("frames", contigs)
    first = Path("from_file.tsv").read_text()
    virnuc.done("frames", contigs, "--chunk-length", "600", "--out", "by_flag.tsv")
    assert Path("by_flag.tsv").read_text() != first
