"""Settings from flags, variables, files, presets and defaults."""

from pathlib import Path

import pytest

from tests.end_to_end.conftest import CommandLine

FILE = """
[defaults]
precision = "fp32"
devices = "cpu"
[predict]
preset = "virnucpro-300"
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


def shown(virnuc: CommandLine, *arguments: str) -> dict[str, tuple[object, str, str]]:
    document = virnuc.done("config", "show", "--json", *arguments).document
    settings = [*document["commands"][arguments[0]], *document["environment"]]
    return {each["setting"]: (each["value"], each["source"], each["where"]) for each in settings}


def test_every_source_and_which_of_them_wins(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("virnuc.toml").write_text(FILE)
    monkeypatch.setenv("VIRNUC_PREDICT_ATTENTION", "reference")
    monkeypatch.setenv("VIRNUC_PREDICT_ENGINE", "packed")
    found = shown(virnuc, "predict", "--engine", "reference", "--esm-model", "8M")
    assert found["engine"] == ("reference", "flag", "--engine")
    assert found["attention"] == ("reference", "environment variable", "VIRNUC_PREDICT_ATTENTION")
    assert found["token-budget"] == (4096, "file", "virnuc.toml [predict]")
    assert found["precision"] == ("fp32", "file", "virnuc.toml [defaults]")
    assert found["chunk-length"] == (300, "preset", "virnucpro-300")
    assert found["esm-model"] == ("8M", "flag", "--esm-model")
    assert found["dnabert-model"] == ("DNABERT-S", "preset", "virnucpro-300")
    assert found["embeddings"] == ("float32", "default", "")
    assert found["head"] == (None, "default", "")


def test_settings_for_a_person(virnuc: CommandLine) -> None:
    out = virnuc.done("config", "show").out
    assert "settings files: none" in out
    for heading in ("predict", "doctor", "config show", "environment"):
        assert f"\n{heading}\n" in out
    Path("other.toml").write_text("[predict]\nchunk-length = 400\n")
    command = ("--config", "other.toml", "config", "show", "predict", "--preset", "virnucpro-300")
    lines = [line.split() for line in virnuc.done(*command).out.splitlines() if line.startswith("  ")]
    assert ["chunk-length", "400", "other.toml", "[predict]"] in lines
    assert ["esm-model", "3B", "preset", "virnucpro-300"] in lines


def test_variables_and_files_of_variables(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Path("mine.toml")
    mine.write_text('[environment]\nVIRNUC_THREADS = 3\nMLFLOW_TRACKING_URI = "http://a:secret@host"\n')
    monkeypatch.setenv("VIRNUC_CONFIG", "mine.toml")
    monkeypatch.setenv("VIRNUC_NOTIFY_URL", "https://example.org/secret")
    found = shown(virnuc, "frames")
    assert found["VIRNUC_NOTIFY_URL"][0] == "***"
    assert found["VIRNUC_THREADS"] == ("3", "file", "mine.toml [environment]")
    assert found["MLFLOW_TRACKING_URI"][0] == "http://host"
    monkeypatch.setenv("VIRNUC_THREADS", "2")
    assert shown(virnuc, "frames")["VIRNUC_THREADS"] == ("2", "environment variable", "VIRNUC_THREADS")
    mine.write_text("[environment]\nVIRNUC_LANE_TIMEOUT = 'much'\n")
    message = "mine.toml [environment]: environment variable VIRNUC_LANE_TIMEOUT is 'much'"
    virnuc.refused(2, message, "config", "show")
    monkeypatch.delenv("VIRNUC_CONFIG")
    monkeypatch.setenv("VIRNUC_PREDICT_TOKEN_BUDGET", "many")
    error = virnuc.refused(2, "'many' is not a valid integer", "predict", "a.fa", "--out", "out")
    assert "environment variable VIRNUC_PREDICT_TOKEN_BUDGET: " in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("config show predct", "predct is no command: give one of predict"),
        ("config show config", "config is a group: give one of show"),
        ("config show predict --no-such", "No such option"),
        ("--config absent.toml config show", "no settings file absent.toml"),
        ("frames --config a.toml", "--config stands before the command"),
    ],
)
def test_what_cannot_be_shown(arguments: str, message: str, virnuc: CommandLine) -> None:
    virnuc.refused(2, message, *arguments.split())


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
