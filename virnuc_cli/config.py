"""Where the value of a setting comes from: flag, environment variable, settings file, preset or default.

A settings file is TOML. It has a section per command, `[predict]` or `[models.pull]`, whose keys are the command's
flags without leading dashes; `[defaults]` applies to every command with such a flag, and `[environment]` sets
environment variables. `virnuc.toml` in the working folder overrides the user's own file, key by key; `--config` reads
only the given file.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import click
from click.core import ParameterSource

from virnuc_core.env_config import VARIABLES, environment_defaults, user_config_folder, value_of
from virnuc_core.errors import UsageError

LOCAL_FILE: Final = "virnuc.toml"
DEFAULTS: Final = "defaults"
ENVIRONMENT: Final = "environment"
# Prefect's server address, which virnuc itself does not read.
ENVIRONMENT_NAMES: Final = (*(variable.name for variable in VARIABLES), "PREFECT_API_URL")
_MOST_BYTES: Final = 1 << 20


class NumberOrWord(click.ParamType[Any]):
    """A whole number, or one of some words."""

    name = "integer or word"

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number as an int; fails for any other text."""
        if value in self._words or isinstance(value, int):
            return cast(int | str, value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number and not {' or '.join(self._words)}.", param, ctx)


# What an option accepts, if not text.
_TOML_TYPES: Final[Mapping[type[click.ParamType[Any]], tuple[str, tuple[type, ...]]]] = {
    click.types.BoolParamType: ("true or false", (bool,)),
    click.types.IntParamType: ("a whole number", (int,)),
    click.types.FloatParamType: ("a number", (int, float)),
    NumberOrWord: ('a whole number, or "auto"', (int, str)),
}

CommandPath = tuple[str, ...]
# By its key in a file, an option of each command that has it.
_Targets = Mapping[str, Sequence[tuple[CommandPath, click.Option]]]


class FileValue(NamedTuple):
    """One value of a settings file, with its file and section."""

    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSettings:
    """Merged settings files.

    Attributes:
        files: nearest first.
        commands: values by command and by click's name of the option.
        environment: values by variable, without those that are set in the environment.
    """

    files: tuple[Path, ...]
    commands: Mapping[CommandPath, Mapping[str, FileValue]]
    environment: Mapping[str, FileValue]

    @property
    def default_map(self) -> dict[str, Any]:
        """The values as click wants them: nested like the commands."""
        nested: dict[str, Any] = {}
        for path, values in self.commands.items():
            inner = nested
            for name in path:
                inner = inner.setdefault(name, {})
            inner |= {name: given.value for name, given in values.items()}
        return nested


def iter_commands(group: click.Group, path: CommandPath = ()) -> Iterator[tuple[CommandPath, click.Command]]:
    """Every command with its full path of words."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from iter_commands(command, (*path, name))
        else:
            yield (*path, name), command


def settings_of(command: click.Command) -> dict[str, click.Option]:
    """The options that a variable or a file may set, by their key in a file."""
    return {
        option.opts[0].lstrip("-"): option
        for option in command.params
        if isinstance(option, click.Option) and option.allow_from_autoenv
    }


def variable_of(path: CommandPath, option: click.Option) -> str:
    """The environment variable of an option, named as click does."""
    return "_".join(["VIRNUC", *path, option.name or ""]).upper().replace("-", "_")


def use_settings_files(ctx: click.Context, config: str | None) -> None:
    """Makes the values of the settings files the defaults of all commands until the context closes.

    Args:
        ctx: of the top-level group; its `obj` becomes the `FileSettings`.
        config: the only file to read; None looks for `virnuc.toml` here and for the user's own file.

    Raises:
        UsageError: a file cannot be read or has an unknown section or key; names file, section and key.
    """
    assert isinstance(ctx.command, click.Group)
    settings = read_settings_files(find_settings_files(config), ctx.command)
    ctx.obj, ctx.default_map = settings, settings.default_map
    try:
        ctx.with_resource(environment_defaults({name: v.value for name, v in settings.environment.items()}))
    except UsageError as error:
        origins = {given.origin for name, given in settings.environment.items() if name in str(error)}
        raise UsageError(f"{', '.join(origins) or 'settings'}: {error}") from error


def find_settings_files(config: str | None) -> tuple[Path, ...]:
    """The files to read, nearest first.

    Raises:
        UsageError: the requested one does not exist.
    """
    if config is None:
        return tuple(path for path in (Path(LOCAL_FILE), _user_file()) if path.exists())
    path = Path(config).expanduser()
    if not path.exists():
        raise UsageError(f"there is no settings file {config}: give --config (VIRNUC_CONFIG) another path.")
    return (path,)


def read_settings_files(files: Sequence[Path], group: click.Group) -> FileSettings:
    """Reads and validates files; for the same key of a command, the first file wins, and in it the command's section.

    Raises:
        UsageError: a file cannot be read or has an unknown section or key; names file, section and key.
    """
    commands: dict[CommandPath, dict[str, FileValue]] = {}
    environment: dict[str, FileValue] = {}
    for file in files:
        document = _read(file)
        shared, variables = (_table(file, name, document.pop(name, {})) for name in (DEFAULTS, ENVIRONMENT))
        sections = [*_sections(file, document, group), (f"{file} [{DEFAULTS}]", shared, _all_targets(group))]
        for origin, table, targets in sections:
            for path, name, value in _converted(origin, table, targets):
                commands.setdefault(path, {}).setdefault(name, FileValue(value, origin))
        for name, text in _variables(file, variables):
            if value_of(name) is None:
                environment.setdefault(name, FileValue(text, f"{file} [{ENVIRONMENT}]"))
    return FileSettings(files=tuple(files), commands=commands, environment=environment)


def _user_file() -> Path:
    return user_config_folder() / "config.toml"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(
            f"{path} is not a file, so it cannot be read for settings: move it, or give --config."
        )
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read for settings: {error.strerror}. Make it readable."
        ) from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{path} is larger than {_MOST_BYTES:,} bytes, which no settings file is.")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte {error.start}), as TOML must be: save it as UTF-8."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}. Mend that place.") from error


def _table(file: Path, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(
            f"{file}: {name} = {_toml(value)} stands in no section of a command: put settings below [{DEFAULTS}], or "
            "below the name of their command, such as [predict]."
        )
    return value


def _sections(
    file: Path, document: Mapping[str, Any], group: click.Group, above: CommandPath = ()
) -> Iterator[tuple[str, Mapping[str, Any], _Targets]]:
    """The sections of commands: origin, values, and the options that they may set."""
    for name, value in document.items():
        path = (*above, name)
        table, full = _table(file, ".".join(path), value), ".".join(path)
        command = group.commands.get(name)
        if command is None:
            known = [*group.commands, *(() if above else (DEFAULTS, ENVIRONMENT))]
            raise UsageError(
                f"{file}: there is no command for the section [{full}]{_nearest(name, known)}. "
                f"Sections are {', '.join(known)}."
            )
        if isinstance(command, click.Group):
            yield from _sections(file, table, command, path)
        else:
            options = settings_of(command)
            yield f"{file} [{full}]", table, {key: [(path, option)] for key, option in options.items()}


def _all_targets(group: click.Group) -> _Targets:
    targets: dict[str, list[tuple[CommandPath, click.Option]]] = {}
    for path, command in iter_commands(group):
        for key, option in settings_of(command).items():
            targets.setdefault(key, []).append((path, option))
    return targets


def _converted(
    origin: str, table: Mapping[str, Any], targets: _Targets
) -> Iterator[tuple[CommandPath, str, Any]]:
    """Command, click's name of the option and value for each key of a section."""
    keys: set[str] = set()
    for name, value in table.items():
        key = name.replace("_", "-")
        if key not in targets:
            raise UsageError(f"{origin}: {name} is no setting there{_nearest(key, targets)}.")
        if key in keys:
            raise UsageError(f"{origin}: {name} is given twice, with _ and with -.")
        keys.add(key)
        for path, option in targets[key]:
            values = value if option.multiple and isinstance(value, list) else [value]
            try:
                checked = [_converted_value(option, one) for one in values]
            except click.BadParameter as error:
                reason = error.message.rstrip(".")
                raise UsageError(
                    f"{origin}: {name} cannot be used for virnuc {' '.join(path)}: {reason}."
                ) from error
            yield path, option.name or key, checked if option.multiple else checked[0]


def _converted_value(option: click.Option, value: object) -> Any:
    """A value as the option's type makes it; unlike text on a command line, it must have the right TOML type."""
    wanted, kinds = _TOML_TYPES.get(type(option.type), ('text in quotes, such as "auto"', (str,)))
    if type(value) not in kinds:
        raise click.BadParameter(f"it must be {wanted}, not {_toml(value)}")
    if isinstance(value, str) and "\0" in value:
        raise click.BadParameter("it holds a NUL character")
    return option.type.convert(value, option, None)


def _variables(file: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Environment variables, as text.

    A file that was found, not named, may be in a folder of someone else's data, which must not decide where code is kept
    or where runs are reported.
    """
    origin = f"{file} [{ENVIRONMENT}]"
    if table and file == Path(LOCAL_FILE):
        raise UsageError(
            f"{origin} is not taken from a file that is found in the working folder: put it into {_user_file()}, "
            "or name the file with --config."
        )
    for name, value in table.items():
        if name not in ENVIRONMENT_NAMES:
            raise UsageError(f"{origin}: {name} is no variable of virnuc{_nearest(name, ENVIRONMENT_NAMES)}.")
        if not isinstance(value, str | int | float):
            raise UsageError(f"{origin}: {name} must be text, a number, true or false, not {_toml(value)}.")
        text = str(int(value)) if isinstance(value, bool) else str(value)
        if "\0" in text:
            raise UsageError(f"{origin}: {name} must be text that an environment variable can hold.")
        yield name, text


def _nearest(name: str, known: Iterable[str]) -> str:
    """A question about the closest known name; empty without one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def _toml(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


Source = Literal["flag", "environment variable", "file", "default"]


def origin_of(ctx: click.Context, option: click.Option) -> tuple[Source, str]:
    """Source of an option's value; the arguments in `ctx` must be parsed."""
    path, name = tuple(ctx.command_path.split()[1:]), option.name or ""
    match ctx.get_parameter_source(name):
        case ParameterSource.COMMANDLINE:
            return "flag", option.opts[0]
        case ParameterSource.ENVIRONMENT:
            return "environment variable", variable_of(path, option)
        case ParameterSource.DEFAULT_MAP if settings := ctx.find_object(FileSettings):
            return "file", settings.commands[path][name].origin
    return "default", ""


def given_origins(ctx: click.Context) -> dict[str, str]:
    """Sources of a command's settings, without defaults."""
    found = {key: origin_of(ctx, option) for key, option in settings_of(ctx.command).items()}
    return {
        key: where if source == "file" else f"{source} {where}"
        for key, (source, where) in found.items()
        if source != "default"
    }


def in_words(error: click.ClickException) -> str:
    """Click's message about an invalid value, with the variable or file that sets it."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and error.option_name == "--config":
        return "--config stands before the command: virnuc --config FILE COMMAND ..."
    if isinstance(error, click.BadParameter) and error.ctx and isinstance(error.param, click.Option):
        source, where = origin_of(error.ctx, error.param)
        if source in ("environment variable", "file"):
            return f"{source} {where}: {message}"
    return message
