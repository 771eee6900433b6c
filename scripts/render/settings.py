"""Tables of docs/configuration.md, from the command line: every setting of every command."""

import re
from typing import Final

import click

from scripts.render.tables import MakeTable, Results, markdown
from virnuc_cli.config import CommandPath, iter_commands, settings_of, variable_of
from virnuc_cli.main import cli
from virnuc_core.env_config import VARIABLES
from virnuc_core.versions import KNOWN_VERSIONS, OLDEST_DRIVER

# Help ends with the default: "Where to compute [auto]."
_HELP: Final = re.compile(r"(?P<meaning>.*?)(?: \[(?P<default>.*)\])?\.?", re.DOTALL)


def settings_tables(_: Results) -> str:
    """One table per command with settings."""
    tables = []
    for path, command in iter_commands(cli):
        if rows := [_row(path, key, option) for key, option in settings_of(command).items()]:
            head = f"### {' '.join(path)}\n\nSection `[{'.'.join(path)}]`.\n\n"
            tables.append(head + markdown("flag|environment variable|key|default|meaning", rows))
    return "\n\n".join(tables)


def _row(path: CommandPath, key: str, option: click.Option) -> tuple[str, ...]:
    found = _HELP.fullmatch(option.help or "")
    assert found is not None  # everything matches
    default = option.to_info_dict()["default"]
    if option.required or option.is_flag:
        default = "must be given" if option.required else "off"
    elif default is None or option.multiple:
        default = ""
    values = option.metavar or option.type.name.upper()
    if isinstance(option.type, click.Choice):
        values = "|".join(map(str, option.type.choices))
    cells = (
        f"`{'/'.join([option.opts[0], *option.secondary_opts])}{'' if option.is_flag else f' {values}'}`",
        f"`{variable_of(path, option)}`",
        f"`{key}`",
        found["default"] or str(default),
        found["meaning"],
    )
    return tuple(cell.replace("|", "\\|") for cell in cells)


def variables_table(_: Results) -> str:
    """Environment variables without a flag."""
    rows = ((f"`{variable.name}`", variable.meaning, variable.default) for variable in VARIABLES)
    return markdown("variable|meaning|default", rows)


def versions_table(_: Results) -> str:
    """The supported versions."""
    rows = [
        (f"{one.package}{' (optional)' * one.is_optional}", one.range_text, one.newer, one.why)
        for one in KNOWN_VERSIONS
    ]
    drivers = ", ".join(f"CUDA {cuda} from driver {driver} on" for cuda, driver in OLDEST_DRIVER.items())
    table = markdown("package|known to work|a newer one is a|what is known of others", rows)
    return f"{table}\n\nOn GPUs: {drivers}; triton is the one that the installed torch asks for."


TABLES: Final[dict[str, MakeTable]] = {
    "settings": settings_tables,
    "variables": variables_table,
    "versions": versions_table,
}
