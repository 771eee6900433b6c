"""Building blocks of commands: a decorator, options made from settings models, and one form of answer."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pkgutil import resolve_name
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

import click

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from virnuc_cli.terminal import OutputMode
    from virnuc_core.settings import Settings

_WHOLE: Final = 1000  # characters, longer than any first sentence

# --json and --debug belong to a single call: no file or variable sets them.
_DEBUG: Final = click.Option(
    ["--debug"], is_flag=True, allow_from_autoenv=False, help="Show the traceback of an error."
)
_OUTPUT: Final = (
    click.Option(["--quiet"], is_flag=True, help="Only warnings and errors."),
    click.Option(
        ["--json", "as_json"],
        is_flag=True,
        allow_from_autoenv=False,
        help="One JSON object on stdout, for machines.",
    ),
    _DEBUG,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command: a JSON document, its text summary, and the exit code."""

    document: Mapping[str, Any]
    summary: str
    exit_code: int = 0


class CommandGroup(click.Group):
    """A group that prints its help when called without a command, and lists commands with whole sentences."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Shows the help on stderr, with the exit code of a usage error, when no command is given."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(click.UsageError.exit_code)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands; click would truncate their descriptions."""
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(_WHOLE)) for name in names])


class Command(click.Command):
    """A command whose options are made when they are needed, since those of settings import pydantic.

    Its repeatable flags accept several values: `--viral a.fa b.fa` is `--viral a.fa --viral b.fa`.
    """

    def __init__(self, make_params: Callable[[], list[click.Parameter]], **attributes: Any) -> None:
        self._make_params = cache(make_params)
        super().__init__(**attributes)

    @property
    def params(self) -> list[click.Parameter]:
        """Arguments and options, in the order of the help."""
        return self._make_params()

    @params.setter
    def params(self, none: list[click.Parameter]) -> None:
        """Click sets an empty list."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats a repeatable flag before each of its values."""
        flags = {
            flag
            for param in self.params
            if isinstance(param, click.Option) and param.multiple
            for flag in param.opts
        }
        spread: list[str] = []
        flag, is_first = "", False
        for place, argument in enumerate(args):
            if argument == "--":
                spread += args[place:]
                break
            if argument.startswith("-") and argument != "-":
                flag, is_first = (argument, True) if argument in flags else ("", False)
            elif flag:
                if not is_first:
                    spread.append(flag)
                is_first = False
            spread.append(argument)
        return super().parse_args(ctx, spread)


def setting_options(kind: "type[Settings]") -> list[click.Option]:
    """The options of a settings model, its own before inherited ones."""
    names = dict.fromkeys(
        name for owner in kind.__mro__ for name in inspect.get_annotations(owner) if name in kind.model_fields
    )
    return [_option(name, kind.model_fields[name]) for name in names]


def _option(name: str, field: "FieldInfo") -> click.Option:
    from virnuc_cli.config import NumberOrWord
    from virnuc_core.settings import help_text, metavar_of, value_kind

    flag, text, value = f"--{name.replace('_', '-')}", help_text(field), value_kind(field)
    if value is bool:
        # Where None keeps what is set, it must be possible to turn it off.
        flags = f"{flag}/--no-{flag[2:]}" if field.default is None else flag
        return click.Option([flags], is_flag=True, default=field.default, help=text)
    is_tuple, default = get_origin(value) is tuple, field.default
    if is_tuple and default:
        default = ",".join(default)
    param_type: Any = str if is_tuple else value
    if get_origin(value) is Literal:
        param_type = click.Choice(get_args(value))
    elif get_origin(value) in (Union, UnionType):
        param_type = NumberOrWord(get_args(get_args(value)[1]))
    return click.Option(
        [flag],
        type=param_type,
        required=field.is_required(),
        default=None if field.is_required() or default == () else default,
        metavar=metavar_of(field),
        multiple=field.default == (),
        help=text,
    )


def command(
    group: click.Group,
    *params: click.Parameter,
    name: str = "",
    settings: str = "",
    force: str = "",
    answers: bool = True,
    **attributes: Any,
) -> Callable[[Callable[..., Answer | None]], Command]:
    """Makes a command of a function that takes validated settings and returns an `Answer`.

    Progress and warnings are shown while it runs, unless it takes `output` and so shows what it does itself.

    Args:
        group: parent of the command.
        params: its own arguments and options.
        name: the function's by default.
        settings: model of its settings, as `module:class`; passed as `settings`.
        force: for a command that makes a run, the help of `--force`.
        answers: False for a command that runs until a signal.
        attributes: as for `click.Command`.
    """

    def make_params() -> list[click.Parameter]:
        made = [*params, *(setting_options(resolve_name(settings)) if settings else ())]
        if force:
            made.append(click.Option(["--force"], is_flag=True, help=force))
        return [*made, *(_OUTPUT if answers else (_DEBUG,))]

    def decorate(function: Callable[..., Answer | None]) -> Command:
        made = Command(
            make_params,
            name=name or function.__name__,
            callback=partial(_run, function, settings),
            help=function.__doc__,
            **attributes,
        )
        group.add_command(made)
        return made

    return decorate


def _texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)


def _run(
    function: Callable[..., Answer | None],
    settings_model: str,
    debug: bool,
    quiet: bool = False,
    as_json: bool | None = None,
    **values: Any,
) -> int:
    """Calls a command's function with its settings, shows its answer if it has one, and returns the exit code."""
    from virnuc_core.files import require_utf8

    require_utf8(*_texts(values.values()))
    if settings_model:
        from virnuc_core.settings import read_settings

        kind = resolve_name(settings_model)
        taken = {name: values.pop(name) for name in kind.model_fields}
        given = {name: value for name, value in taken.items() if value is not None}
        values["settings"] = read_settings(kind, given)
    if as_json is None:
        function(**values)
        return 0
    from virnuc_cli.config import given_origins
    from virnuc_cli.terminal import show, terminal  # imports rich
    from virnuc_core.settings import settings_given

    output: OutputMode = "json" if as_json else "quiet" if quiet else "human"
    shows_itself = "output" in inspect.signature(function).parameters
    if shows_itself:
        values["output"] = output
    origins = given_origins(click.get_current_context())
    with settings_given(origins), nullcontext() if shows_itself else terminal(output):
        answer = function(**values)
    assert answer is not None
    show(output, answer.document, answer.summary)
    return answer.exit_code
