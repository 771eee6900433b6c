"""Fills the reference of docs/configuration.md from the command line itself: every setting of every command.

    python -m scripts.render_settings [--check]

A part stands between `<!-- NAME -->` and `<!-- /NAME -->`. With --check nothing is written, and the exit code says
whether the page is what the commands give.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from scripts.result_pages import RESULTS, ResultPage, markdown
from virnuc_cli.config import variable_of
from virnuc_cli.config_file import CommandPath, iter_commands, settings_of
from virnuc_cli.main import cli
from virnuc_core.env_config import VARIABLES
from virnuc_core.versions import KNOWN_VERSIONS, OLDEST_DRIVER

PAGE: Final = Path(__file__).parents[1] / "docs" / "configuration.md"
# Help ends with what holds when nothing is given: "Where to compute [auto]."
_HELP: Final = re.compile(r"(?P<meaning>.*?)(?: \[(?P<default>.*)\])?\.?", re.DOTALL)


def settings_part() -> str:
    """One table for each command that has settings."""
    return "\n\n".join(_tables())


def variables_part() -> str:
    """The environment variables that are no flag's."""
    rows = ((f"`{variable.name}`", variable.meaning, variable.default) for variable in VARIABLES)
    return markdown("variable|meaning|default", rows)


def versions_part() -> str:
    """The versions that are known to work."""
    rows = (
        (known.package + (" (optional)" if known.is_optional else ""), known.in_words, known.newer, known.why)
        for known in KNOWN_VERSIONS
    )
    drivers = ", ".join(f"CUDA {cuda} from driver {driver} on" for cuda, driver in OLDEST_DRIVER.items())
    table = markdown("package|known to work|a newer one is a|what is known of others", rows)
    return f"{table}\n\nOn GPUs: {drivers}; triton is the one that the installed torch asks for."


def _tables() -> Iterator[str]:
    for path, command in iter_commands(cli):
        rows = [_row(path, key, option) for key, option in settings_of(command).items()]
        if rows:
            yield (
                f"### {' '.join(path)}\n\nSection `[{'.'.join(path)}]`.\n\n"
                + markdown("flag|environment variable|key|default|meaning", rows)
            )


def _row(path: CommandPath, key: str, option: click.Option) -> tuple[str, ...]:
    found = _HELP.fullmatch(option.help or "")
    assert found is not None  # everything matches
    return (
        f"`{option.opts[0]}{_values(option)}`",
        f"`{variable_of(path, option)}`",
        f"`{key}`",
        _escaped(found["default"] or _default(option)),
        _escaped(found["meaning"]),
    )


def _values(option: click.Option) -> str:
    """What comes after the flag."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {_escaped('|'.join(map(str, option.type.choices)))}"
    return f" {_escaped(option.metavar or option.type.name.upper())}"


def _default(option: click.Option) -> str:
    if option.required:
        return "must be given"
    if option.is_flag:
        return "off"
    default = option.to_info_dict()["default"]
    return "" if default is None or option.multiple else str(default)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


RESULT_PAGE: Final = ResultPage(
    path=PAGE,
    script="scripts.render_settings",
    results=RESULTS,
    read=lambda _: None,
    tables={
        "settings": lambda _: settings_part(),
        "variables": lambda _: variables_part(),
        "versions": lambda _: versions_part(),
    },
)


if __name__ == "__main__":
    sys.exit(RESULT_PAGE.main())
