"""Tables of docs/configuration.md, from the classes of the settings."""

from pkgutil import resolve_name
from typing import Final

from scripts.render.tables import MakeTable, Results, markdown
from virnuc_cli.main import cli
from virnuc_cli.options import Command, iter_commands, setting_options
from virnuc_core.env_config import EnvConfig
from virnuc_core.settings import in_words
from virnuc_core.versions import KNOWN_VERSIONS, OLDEST_DRIVER


def settings_table(_: Results) -> str:
    """A table for each set of commands, with the settings that they share; a setting with another default is another one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, command in iter_commands(cli):
        for model in command.models if isinstance(command, Command) else ():
            kind = resolve_name(f"virnuc_core.settings:{model}")
            for option in setting_options(kind):
                field = kind.model_fields[option.name]
                values = "" if option.is_flag else f" {option.metavar}"
                cells = (
                    f"`{'/'.join([*option.opts, *option.secondary_opts])}{values}`",
                    in_words(field) or "must be given",
                    field.description,
                )
                rows.setdefault(tuple(cell.replace("|", "\\|") for cell in cells), []).append(f"`{name}`")
    tables: dict[str, list[tuple[str, ...]]] = {}
    for row, names in rows.items():
        tables.setdefault(", ".join(names), []).append(row)
    return "\n\n".join(
        f"{names}:\n\n{markdown('flag|default|meaning', own)}" for names, own in tables.items()
    )


def variables_table(_: Results) -> str:
    fields = EnvConfig.model_fields.values()
    return markdown("variable|meaning", ((f"`{field.alias}`", field.description or "") for field in fields))


def versions_table(_: Results) -> str:
    rows = [
        (f"{one.package}{' (optional)' * one.is_optional}", one.works, one.other, one.why)
        for one in KNOWN_VERSIONS
    ]
    drivers = ", ".join(f"CUDA {cuda} from driver {driver} on" for cuda, driver in OLDEST_DRIVER.items())
    table = markdown("package|known to work|another one is a|what is known of others", rows)
    return f"{table}\n\nOn GPUs: {drivers}; triton is the one that the installed torch asks for."


TABLES: Final[dict[str, MakeTable]] = {
    "settings": settings_table,
    "variables": variables_table,
    "versions": versions_table,
}
