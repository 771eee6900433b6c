"""Where the value of a setting comes from: flag, environment variable, settings file, preset or default.

A settings file is TOML. It has a section per command, `[predict]` or `[models.pull]`, whose keys are the command's
flags without leading dashes; `[defaults]` applies to every command with such a flag, and `[environment]` sets
environment variables. `virnuc.toml` in the working folder overrides the user's own file, key by key; `--config` reads
only the given file.
"""

import copy
import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import click
from click.core import ParameterSource

from virnuc_core.env_config import VARIABLES, environment_defaults, user_config_folder, value_of
from virnuc_core.errors import UsageError
from virnuc_core.plain_text import visible
from virnuc_core.settings import PRESETS

LOCAL_FILE: Final = "virnuc.toml"
DEFAULTS: Final = "defaults"
ENVIRONMENT: Final = "environment"
# Prefect's server address, which virnuc itself does not read.
ENVIRONMENT_NAMES: Final = (*(variable.name for variable in VARIABLES), "PREFECT_API_URL")
_MOST_BYTES: Final = 1 << 20

CommandPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileValue:
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
    ctx.obj = settings
    ctx.default_map = settings.default_map
    values = {name: given.value for name, given in settings.environment.items()}
    try:
        ctx.with_resource(environment_defaults(values))
    except UsageError as error:
        origins = {given.origin for name, given in settings.environment.items() if name in str(error)}
        raise UsageError(f"{', '.join(origins) or 'settings'}: {error}") from error


def find_settings_files(config: str | None) -> tuple[Path, ...]:
    """The files to read, nearest first.

    Raises:
        UsageError: the requested one does not exist.
    """
    if config is None:
        return tuple(
            path for path in (Path(LOCAL_FILE), user_config_folder() / "config.toml") if path.exists()
        )
    path = Path(config).expanduser()
    if not path.exists():
        raise UsageError(f"there is no settings file {config}: give --config (VIRNUC_CONFIG) another path.")
    return (path,)


def read_settings_files(files: Sequence[Path], group: click.Group) -> FileSettings:
    """Reads and validates files; for the same key of a command, the first file wins.

    Raises:
        UsageError: a file cannot be read or has an unknown section or key; names file, section and key.
    """
    commands = dict(iter_commands(group))
    given: dict[CommandPath, dict[str, FileValue]] = {path: {} for path in commands}
    environment: dict[str, FileValue] = {}
    for file in files:
        document = _File(file, _read(file))
        document.require_sections(commands)
        for path, command in commands.items():
            for name, value in document.values(path, command):
                given[path].setdefault(name, value)
        for name, value in document.environment():
            if value_of(name) is None:
                environment.setdefault(name, value)
    return FileSettings(
        files=tuple(files),
        commands={path: values for path, values in given.items() if values},
        environment=environment,
    )


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


@dataclass(frozen=True, slots=True)
class _File:
    """One file, parsed."""

    path: Path
    document: Mapping[str, Any]

    def require_sections(self, commands: Mapping[CommandPath, click.Command]) -> None:
        """Refuses unknown sections and keys, and keys outside a section."""
        groups = {path[:depth] for path in commands for depth in range(1, len(path))}
        for name in (DEFAULTS, ENVIRONMENT):
            self._table((name,))
        self._require_words((), {path[0] for path in commands} | {DEFAULTS, ENVIRONMENT})
        for path in groups:
            self._require_words(path, {other[len(path)] for other in commands if other[: len(path)] == path})
        for path, command in commands.items():
            self._require_keys(path, settings_of(command))
        shared = {
            key: option for command in commands.values() for key, option in settings_of(command).items()
        }
        self._require_keys((DEFAULTS,), shared)

    def values(self, path: CommandPath, command: click.Command) -> Iterator[tuple[str, FileValue]]:
        """The validated values for one command: its section first, then the shared ones."""
        for section in (path, (DEFAULTS,)):
            options = settings_of(command)
            for key, value in self._table(section).items():
                if option := options.get(key.replace("_", "-")):
                    checked = self._checked(section, key, option, value, path)
                    yield option.name or key, FileValue(checked, self._origin(section))

    def environment(self) -> Iterator[tuple[str, FileValue]]:
        """The variables, as text.

        Raises:
            UsageError: the file was found, not named: a folder of someone else's data must not decide where code
                is kept or where runs are reported.
        """
        if self.path == Path(LOCAL_FILE) and self._table((ENVIRONMENT,)):
            raise UsageError(
                f"{self._origin((ENVIRONMENT,))} is not taken from a file that is found in the working folder: put it "
                f"into {user_config_folder() / 'config.toml'}, or name the file with --config."
            )
        for name, value in self._table((ENVIRONMENT,)).items():
            if name not in ENVIRONMENT_NAMES:
                self._fail(
                    (ENVIRONMENT,), name, f"is no variable of virnuc{_nearest(name, ENVIRONMENT_NAMES)}"
                )
            if not isinstance(value, str | int | float):
                self._fail((ENVIRONMENT,), name, f"must be text, a number, true or false, not {_toml(value)}")
            text = str(int(value)) if isinstance(value, bool) else str(value)
            if "\0" in text:
                self._fail((ENVIRONMENT,), name, "must be text that an environment variable can hold")
            yield name, FileValue(text, self._origin((ENVIRONMENT,)))

    def _table(self, section: CommandPath) -> Mapping[str, Any]:
        table: Mapping[str, Any] = self.document
        for depth, name in enumerate(section):
            inner = table.get(name, {})
            if not isinstance(inner, dict):
                where = f"in [{'.'.join(section[:depth])}]" if depth else "outside of any section"
                raise UsageError(
                    f"{self.path}: {name} = {_toml(inner)} stands {where}, and {name} is the name of a section: "
                    f"write [{'.'.join(section[: depth + 1])}] and its settings below."
                )
            table = inner
        return table

    def _require_words(self, section: CommandPath, known: Iterable[str]) -> None:
        names = sorted(known)
        for name, value in self._table(section).items():
            if name in names:
                continue
            full = ".".join((*section, name))
            if isinstance(value, dict):
                raise UsageError(
                    f"{self.path}: there is no command for the section [{full}]{_nearest(name, names)}. "
                    f"Sections are {', '.join(names)}."
                )
            raise UsageError(
                f"{self.path}: {full} = {_toml(value)} stands in no section of a command: put it below "
                f"[{DEFAULTS}], or below the name of its command."
            )

    def _require_keys(self, section: CommandPath, options: Mapping[str, click.Option]) -> None:
        seen = set()
        for name in self._table(section):
            key = name.replace("_", "-")
            if key not in options:
                whose = "any command" if section == (DEFAULTS,) else f"virnuc {' '.join(section)}"
                self._fail(section, name, f"is no setting of {whose}{_nearest(key, options)}")
            if key in seen:
                self._fail(section, name, "is given twice, with _ and with -")
            seen.add(key)

    def _checked(
        self, section: CommandPath, key: str, option: click.Option, value: object, command: CommandPath
    ) -> Any:
        try:
            if option.multiple or option.nargs != 1:
                return [
                    _checked_one(option, item) for item in (value if isinstance(value, list) else [value])
                ]
            return _checked_one(option, value)
        except (click.BadParameter, TypeError) as error:
            reason = error.message if isinstance(error, click.BadParameter) else str(error)
            elsewhere = "" if section == command else f" for virnuc {' '.join(command)}"
            self._fail(section, key, f"cannot be used{elsewhere}: {reason.rstrip('.')}")

    def _origin(self, section: CommandPath) -> str:
        return f"{self.path} [{'.'.join(section)}]"

    def _fail(self, section: CommandPath, key: str, what: str) -> NoReturn:
        raise UsageError(f"{self._origin(section)}: {key} {what}.")


def _checked_one(option: click.Option, value: object) -> Any:
    """One value of an option.

    Raises:
        TypeError: it has another TOML type.
        click.BadParameter: the option does not accept it.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise TypeError(f"it must be true or false, not {_toml(value)}")
        return value
    wanted, kinds = _wanted(option)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"it must be {wanted}, not {_toml(value)}")
    if isinstance(value, str) and "\0" in value:
        raise TypeError("it holds a NUL character")
    return option.type.convert(value, option, None)


def _wanted(option: click.Option) -> tuple[str, tuple[type, ...]]:
    """What an option accepts, as text and as types of TOML values."""
    if isinstance(option.type, click.types.IntParamType):
        return "a whole number", (int,)
    if isinstance(option.type, click.types.FloatParamType):
        return "a number", (int, float)
    return 'text in quotes, such as "auto"', (str,)


def _nearest(name: str, known: Iterable[str]) -> str:
    """A question about the closest known name; empty without one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def _toml(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


Source = Literal["flag", "environment variable", "file", "preset", "default"]

_PASSWORD: Final = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A setting as a command would use it.

    Attributes:
        setting: its key in a settings file, or a variable's name.
        value: None leaves the choice to the run.
        where: flag, variable, file and section, or preset; empty for a default.
    """

    setting: str
    value: Any
    source: Source
    where: str = ""

    @property
    def line(self) -> tuple[str, str, str]:
        """Setting, value and source as text."""
        if isinstance(self.value, bool):
            value = str(self.value).lower()
        elif isinstance(self.value, list | tuple):
            value = ", ".join(map(str, self.value)) or "-"
        else:
            value = "-" if self.value is None else str(self.value)
        source = self.where if self.source == "file" else f"{self.source} {self.where}".rstrip()
        return self.setting, visible(value), visible(source)


def variable_of(path: CommandPath, option: click.Option) -> str:
    """The environment variable of an option, named as click does."""
    return "_".join(["VIRNUC", *path, option.name or ""]).upper().replace("-", "_")


def without_password(text: str) -> str:
    """Removes users and passwords from URLs in a text."""
    return _PASSWORD.sub("//***@", text)


def origin_of(ctx: click.Context, option: click.Option) -> tuple[Source, str]:
    """Source of an option's value; the arguments in `ctx` must be parsed."""
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
    """Sources of a command's settings, without defaults."""
    found = {key: origin_of(ctx, option) for key, option in settings_of(ctx.command).items()}
    return {
        key: where if source == "file" else f"{source} {where}"
        for key, (source, where) in found.items()
        if source != "default"
    }


def command_origins(root: click.Context, path: CommandPath, arguments: Sequence[str]) -> Iterator[Origin]:
    """Every setting of a command as it would be with these arguments.

    Args:
        root: context of the top-level group.
        path: words of the command.
        arguments: flags after them; required arguments may be missing.

    Raises:
        click.ClickException: a flag, variable or file has an invalid value.
    """
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
    """Every variable that virnuc reads; passwords in URLs are removed."""
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
    """Click's message about an invalid value, with the variable or file that sets it."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and error.option_name == "--config":
        return "--config stands before the command: virnuc --config FILE COMMAND ..."
    if isinstance(error, click.BadParameter) and error.ctx and isinstance(error.param, click.Option):
        source, where = origin_of(error.ctx, error.param)
        if source in ("environment variable", "file"):
            return f"{source} {where}: {message}"
    return message


def split_command(group: click.Group, words: Sequence[str]) -> tuple[CommandPath, tuple[str, ...]]:
    """Splits words into those of a command and the rest.

    Raises:
        UsageError: they name no command.
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
