"""What can be asked of a benchmark."""

import pytest

from virnuc_core.benchmark.__main__ import build_parser
from virnuc_core.benchmark.settings import BenchSettings, Lengths, arguments_of
from virnuc_core.errors import UsageError


def parse(*arguments: str) -> BenchSettings:
    return BenchSettings.from_options(vars(build_parser().parse_args(arguments)))


def test_defaults() -> None:
    settings = parse("--model", "random:8M")
    assert settings.models == ("random:8M",)
    assert settings.precisions == ("auto",)
    assert settings.devices == ("auto",)
    assert (settings.seconds, settings.repeats, settings.end_to_end) == (5.0, 3, None)
    assert list(map(str, settings.lengths_for("esm2"))) == ["fixed:166"]
    assert list(map(str, settings.lengths_for("dnabert_s"))) == ["fixed:500"]


def test_lists() -> None:
    settings = parse(
        "--model", "a", "--model", "b", "--precision", "fp16,fp8", "--lengths", "tokens:106,lognormal"
    )
    assert settings.models == ("a", "b")
    assert settings.precisions == ("fp16", "fp8")
    assert settings.lengths_for("esm2") == (Lengths("tokens", 106), Lengths("lognormal"))


def test_the_command_line_is_given_back() -> None:
    arguments = ["--model", "a", "--model", "b", "--devices", "0,1", "--end-to-end", "7.0", "--scaling"]
    assert arguments_of(vars(build_parser().parse_args(arguments))) == arguments


@pytest.mark.parametrize("text", ["fixed", "fixed:", "fixed:2", "fixed:-9", "lognormal:3", "uniform:5", ""])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--lengths"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is given"),
        (["--model", "a", "--precision", "fp16,int8"], "--precision int8 is unknown"),
        (["--model", "a", "--seconds", "0"], "must be above 0"),
        (["--model", "a", "--repeats", "0"], "must be above 0"),
        (["--model", "a", "--scaling"], "--end-to-end S as well"),
        (["--model", "a", "--end-to-end", "5", "--lengths", "tokens:106"], "give fixed:N"),
    ],
)
def test_contradictions_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(*arguments)
