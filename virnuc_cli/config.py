"""`virnuc config`: the value of every setting, and its source: flag, environment variable, file, preset or default."""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import click
from click.core import ParameterSource

from virnuc_cli.config_file import ENVIRONMENT_NAMES, CommandPath, FileSettings, iter_commands, settings_of
from virnuc_cli.options import OUTPUT_OPTIONS, CommandGroup, with_options
from virnuc_core.env_config import VARIABLES, value_of
from virnuc_core.errors import UsageError
from virnuc_core.plain_text import visible

Source = Literal["flag", "environment variable", "file", "preset", "default"]

_PASSWORD: Final = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """One setting as a command would have it.

    Attributes:
        setting: its key in a settings file, or the name of a variable.
        value: what holds; None leaves the choice to the run.
        source: the kind of place that it came from.
        where: that place: flag, variable, file and section, or preset; empty for a default.
    """

    setting: str
    value: Any
    source: Source
    where: str = ""

    @property
    def line(self) -> tuple[str, str, str]:
        """Setting, value and source for a person."""
        if isinstance(self.value, bool):
            value = str(self.value).lower()
        elif isinstance(self.value, list | tuple):
            value = ", ".join(map(str, self.value)) or "-"
        else:
            value = "-" if self.value is None else str(self.value)
        source = self.where if self.source == "file" else f"{self.source} {self.where}".rstrip()
        return self.setting, visible(value), visible(source)


def variable_of(path: CommandPath, option: click.Option) -> str:
    """The environment variable that sets an option, as click makes its name."""
    return "_".join(["VIRNUC", *path, option.name or ""]).upper().replace("-", "_")


def without_password(text: str) -> str:
    """An address, or a message with addresses, without the users and passwords in them."""
    return _PASSWORD.sub("//***@", text)


def origin_of(ctx: click.Context, option: click.Option) -> tuple[Source, str]:
    """Where a command's option has its value from.

    Args:
        ctx: of the command, its arguments read.
        option: one of its options.
    """
    path = _path_of(ctx)
    name = option.name or ""
    source = ctx.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE:
        return "flag", option.opts[0]
    if source is ParameterSource.ENVIRONMENT:
        return "environment variable", variable_of(path, option)
    if source is ParameterSource.DEFAULT_MAP:
        settings = ctx.find_object(FileSettings)
        return "file", settings.commands[path][name].origin if settings else ""
    return "default", ""


def given_origins(ctx: click.Context) -> dict[str, str]:
    """Where the settings of a command were given, without those that hold by default."""
    found = {key: origin_of(ctx, option) for key, option in settings_of(ctx.command).items()}
    return {
        key: where if source == "file" else f"{source} {where}"
        for key, (source, where) in found.items()
        if source != "default"
    }


def command_origins(root: click.Context, path: CommandPath, arguments: Sequence[str]) -> Iterator[Origin]:
    """Every setting of a command, as it would be with these arguments.

    Args:
        root: context of the group of all commands.
        path: words of the command.
        arguments: flags after them; what the command needs to run may be missing.

    Raises:
        click.ClickException: a flag, variable or file has a value that cannot be used.
    """
    from virnuc_core.settings import PRESETS  # imports pydantic, which --help needs not wait for

    parent, command = root, root.command
    for depth, name in enumerate(path, start=1):
        assert isinstance(command, click.Group)
        command = command.commands[name]
        if depth < len(path):
            parent = click.Context(command, parent=parent, info_name=name)
    options = settings_of(command)
    relaxed = click.Command(
        path[-1],
        params=[_not_required(option) for option in command.params if isinstance(option, click.Option)],
        context_settings={"allow_extra_args": True},
    )
    with relaxed.make_context(path[-1], list(arguments), parent=parent) as ctx:
        preset = str(ctx.params.get("preset"))
        chosen_together = {str(name): choice for name, choice in PRESETS.items()}.get(preset, {})
        for key, option in options.items():
            value = ctx.params[option.name or ""]
            source, where = origin_of(ctx, option)
            chosen = chosen_together.get(option.name or "")
            if value is None and chosen is not None:
                yield Origin(setting=key, value=chosen, source="preset", where=preset)
            else:
                yield Origin(setting=key, value=value, source=source, where=where)


def environment_origins(settings: FileSettings) -> Iterator[Origin]:
    """Every variable that virnuc reads; passwords in addresses are left out."""
    defaults = {variable.name: variable.default.replace("`", "") for variable in VARIABLES}
    for name in ENVIRONMENT_NAMES:
        value = value_of(name)
        if value is None:
            yield Origin(setting=name, value=defaults.get(name), source="default")
            continue
        value = without_password(value)
        if name in settings.environment:
            yield Origin(setting=name, value=value, source="file", where=settings.environment[name].origin)
        else:
            yield Origin(setting=name, value=value, source="environment variable", where=name)


def in_words(error: click.ClickException) -> str:
    """What click says of a wrong value, with the variable or file that it stands in."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and error.option_name == "--config":
        return "--config stands before the command: virnuc --config FILE COMMAND ..."
    if isinstance(error, click.BadParameter) and error.ctx and isinstance(error.param, click.Option):
        source, where = origin_of(error.ctx, error.param)
        if source in ("environment variable", "file"):
            return f"{source} {where}: {message}"
    return message


def split_command(group: click.Group, words: Sequence[str]) -> tuple[CommandPath, tuple[str, ...]]:
    """The words that name a command, and the rest.

    Raises:
        UsageError: they name none.
    """
    path: CommandPath = ()
    command: click.Command = group
    rest = tuple(words)
    while isinstance(command, click.Group):
        if not rest or rest[0] not in command.commands:
            known = ", ".join(command.commands)
            wrong = (
                f"{' '.join((*path, *rest[:1]))} is no command" if rest else f"{' '.join(path)} is a group"
            )
            raise UsageError(f"{wrong}: give one of {known}.")
        command = command.commands[rest[0]]
        path, rest = (*path, rest[0]), rest[1:]
    return path, rest


def _path_of(ctx: click.Context) -> CommandPath:
    """The words of a command after the program's name."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    return tuple(words)


def _not_required(option: click.Option) -> click.Option:
    relaxed = copy.copy(option)
    relaxed.required = False
    return relaxed


@click.group(name="config", cls=CommandGroup)
def config_group() -> None:
    """What the settings are, and where they come from."""


@config_group.command(context_settings={"ignore_unknown_options": True})
@with_options(
    click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND [FLAGS]...]"),
    *OUTPUT_OPTIONS,
)
@click.pass_context
def show(ctx: click.Context, command: tuple[str, ...], quiet: bool, as_json: bool, debug: bool) -> None:
    """Every setting of COMMAND (of all commands), its value, and where that came from.

    FLAGS are taken as if COMMAND were run with them.
    """
    from virnuc_cli import terminal  # imports rich

    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    settings = root.obj
    assert isinstance(settings, FileSettings)
    if command:
        chosen = [split_command(root.command, command)]
    else:
        chosen = [(path, ()) for path, _ in iter_commands(root.command)]
    found = {" ".join(path): list(command_origins(root, path, rest)) for path, rest in chosen}
    environment = list(environment_origins(settings))
    document: dict[str, Any] = {
        "files": [str(file) for file in settings.files],
        "commands": {name: [asdict(origin) for origin in origins] for name, origins in found.items()},
        "environment": [asdict(origin) for origin in environment],
    }
    files = ", ".join(document["files"]) or "none"
    tables = {name: origins for name, origins in {**found, "environment": environment}.items() if origins}
    text = [f"settings files: {files}"]
    text += [
        f"{name}\n{terminal.aligned([origin.line for origin in origins])}" for name, origins in tables.items()
    ]
    terminal.show("json" if as_json else "human", document, "\n\n".join(text))
