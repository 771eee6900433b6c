"""What settings files may contain, and the errors about anything else."""

from pathlib import Path

import click
import pytest

from virnuc_cli.config import find_settings_files, iter_commands, read_settings_files, settings_of
from virnuc_cli.main import cli
from virnuc_core.env_config import env, environment_defaults
from virnuc_core.errors import UsageError


def read(path: Path, text: str | bytes) -> object:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_settings_files([path], cli)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[predict]\nprecison = 'fp16'",
            r"\[predict\]: precison is no setting there: did you mean precision",
        ),
        ("[predct]\nprecision = 'fp16'", r"no command for the section \[predct\]: did you mean predict\?"),
        (
            "[defaults]\ndevice = 'cpu'",
            r"\[defaults\]: device is no setting there: did you mean devices\?",
        ),
        ("precision = 'fp16'", r"precision = 'fp16' stands in no section.*\[defaults\]"),
        ("predict = 1", r"predict = 1 stands in no section"),
        (
            "[predict]\ntoken-budget = 'many'",
            r"\[predict\]: token-budget .* must be a whole number, not 'many'",
        ),
        ("[predict]\ntoken-budget = 1.5", "must be a whole number, not 1.5"),
        ("[predict]\ntoken-budget = true", "must be a whole number, not true"),
        ("[predict]\nshard-seconds = '3'", "shard-seconds .* must be a number, not '3'"),
        ("[predict]\nforce = 'yes'", "force .* must be true or false, not 'yes'"),
        ("[predict]\ndevices = 0", r"devices .* must be text in quotes, such as \"auto\", not 0"),
        ("[predict]\ndevices = ['0']", "devices .* must be text in quotes"),
        (
            "[predict]\nprecision = 'fp12'",
            r"precision cannot be used for virnuc predict: 'fp12' is not one of 'auto', 'fp32'",
        ),
        (
            "[defaults]\nembeddings = 'none'",
            "embeddings cannot be used for virnuc embed: 'none' is not one of",
        ),
        ("[predict]\ntoken_budget = 1\ntoken-budget = 2", "token-budget is given twice"),
        ("[predict]\njson = true", "json is no setting there"),
        ('[predict]\nhead = "a\\u0000b"', "NUL"),
        ("[environment]\nVIRNUC_HOM = '/a'", "VIRNUC_HOM is no variable of virnuc: did you mean VIRNUC_HOME"),
        ("[environment]\nLD_PRELOAD = '/a'", "LD_PRELOAD is no variable of virnuc"),
        ("[environment]\nVIRNUC_HOME = ['/a']", "VIRNUC_HOME must be text, a number, true or false"),
        (
            '[environment]\nVIRNUC_HOME = "a\\u0000"',
            "VIRNUC_HOME must be text that an environment variable can",
        ),
        ("[predict\na = 1", "is not TOML: .*line 1"),
        ("a = " + "[" * 100_000, "is not TOML"),
        ("a = " + "9" * 10_000, "is not TOML"),
        (b"[predict]\nhead = '\xff'", r"is not UTF-8 \(byte 18\)"),
        (b"\xff\xfe[\x00", "is not UTF-8"),
        (b"#" * (1 << 20) + b"\n", "is larger than 1,048,576 bytes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_file_is_one_clear_error(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    with pytest.raises(UsageError, match=message) as error:
        read(path, text)
    assert str(path) in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        read_settings_files([tmp_path], cli)
    with pytest.raises(UsageError, match="there is no settings file absent"):
        find_settings_files("absent")


def test_files_are_found_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert find_settings_files(None) == ()
    own = tmp_path / "xdg" / "virnuc" / "config.toml"
    own.parent.mkdir(parents=True)
    for path in (own, tmp_path / "virnuc.toml"):
        path.touch()
    assert find_settings_files(None) == (Path("virnuc.toml"), own)
    assert find_settings_files(str(own)) == (own,)


def test_the_nearer_file_wins_key_by_key(tmp_path: Path) -> None:
    near, far = tmp_path / "near.toml", tmp_path / "far.toml"
    near.write_text("[defaults]\nprecision = 'fp16'\n[train]\nesm_model = 'random:8M'\n")
    far.write_text("[predict]\nprecision = 'bf16'\ntoken_budget = 2048\n[embed]\nforce = true\n")
    found = read_settings_files([near, far], cli)
    assert found.default_map["predict"] == {"precision": "fp16", "token_budget": 2048}
    assert found.default_map["embed"] == {"precision": "fp16", "force": True}
    assert found.commands["predict",]["precision"].origin == f"{near} [defaults]"
    assert found.commands["predict",]["token_budget"].origin == f"{far} [predict]"
    assert found.default_map["train"] == {"precision": "fp16", "esm_model": "random:8M"}
    assert "frames" not in found.default_map


def test_a_value_for_one_command_wins_over_that_for_all(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[defaults]\nprecision = 'fp16'\n[predict]\nprecision = 'bf16'\n")
    found = read_settings_files([path], cli)
    assert found.default_map["predict"]["precision"] == "bf16"
    assert found.default_map["embed"]["precision"] == "fp16"
    assert found.commands["predict",]["precision"].origin == f"{path} [predict]"


def test_a_found_file_sets_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("virnuc.toml").write_text("[environment]\nVIRNUC_STAGING = '/somewhere'\n")
    with pytest.raises(
        UsageError, match=r"virnuc.toml \[environment\] is not taken from a file that is found"
    ):
        read_settings_files(find_settings_files(None), cli)
    assert (
        read_settings_files([tmp_path / "virnuc.toml"], cli).environment["VIRNUC_STAGING"].value
        == "/somewhere"
    )


def test_variables_of_a_file_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_DISABLE_FP16", "0")
    with environment_defaults({"VIRNUC_THREADS": "3", "VIRNUC_DISABLE_FP16": "1"}):
        assert env().threads == 3
        assert env().switches == ()
    assert env().threads != 3


def test_key_and_variable_of_every_setting_are_its_flag() -> None:
    """`--token-budget`, `token-budget` and `..._TOKEN_BUDGET` are one name."""
    for path, command in iter_commands(cli):
        for key, option in settings_of(command).items():
            assert isinstance(option, click.Option)
            assert key == (option.name or "").replace("_", "-"), path
            assert option.nargs == 1, path
