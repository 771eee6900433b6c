"""Building blocks of commands: a decorator, options made from settings models, and one form of answer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from virnuc_cli.config import given_origins
from virnuc_core.settings import (
    LaneSettings,
    Settings,
    help_text,
    metavar_of,
    read_settings,
    settings_given,
    value_kind,
)

if TYPE_CHECKING:
    from virnuc_cli.terminal import OutputMode

_WHOLE: Final = 1000  # characters, longer than any first sentence

Decorator = Callable[[Any], Any]

# --json and --debug belong to a single call: no file or variable sets them.
_DEBUG: Final = click.option(
    "--debug", is_flag=True, allow_from_autoenv=False, help="Show the traceback of an error."
)
_OUTPUT: Final = (
    click.option("--quiet", is_flag=True, help="Only warnings and errors."),
    click.option(
        "--json",
        "as_json",
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


class SpreadCommand(click.Command):
    """A command whose repeatable flags accept several values: `--viral a.fa b.fa` is `--viral a.fa --viral b.fa`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats such a flag before each of its values."""
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


def setting_options(
    kind: type[Settings], only: Sequence[str] = (), otherwise: str | None = None
) -> list[Decorator]:
    """The options of a settings model, its own before inherited ones.

    Args:
        kind: the model.
        only: names of the settings; all of them by default.
        otherwise: help text on the fallback, for options without a default of their own.
    """
    owners = [owner for owner in kind.__mro__ if issubclass(owner, Settings)]
    names = dict.fromkeys(
        name for owner in owners for name in inspect.get_annotations(owner) if name in kind.model_fields
    )
    return [_option(name, kind.model_fields[name], otherwise) for name in names if not only or name in only]


def _option(name: str, field: FieldInfo, otherwise: str | None) -> Decorator:
    flag, text, value = f"--{name.replace('_', '-')}", help_text(field), value_kind(field)
    if value is bool:
        return click.option(flag, is_flag=True, help=text)
    default = field.default
    if otherwise is not None:
        default, text = None, f"{text.rstrip('.').partition(' [')[0]} [{otherwise}]."
    is_tuple = get_origin(value) is tuple
    return click.option(
        flag,
        type=click.Choice(get_args(value)) if get_origin(value) is Literal else str if is_tuple else value,
        required=default is PydanticUndefined,
        default=None
        if default in ((), PydanticUndefined)
        else ",".join(default)
        if is_tuple and default
        else default,
        metavar=metavar_of(field),
        multiple=default == (),
        help=text,
    )


def _take_settings(kind: type[Settings], values: dict[str, Any]) -> Settings:
    """Pops the settings of one kind from the values of a command."""
    taken = {name: values.pop(name) for name in kind.model_fields}
    return read_settings(kind, {name: value for name, value in taken.items() if value is not None})


def command(
    group: click.Group,
    *params: Decorator,
    settings: type[Settings] | None = None,
    lanes: bool = False,
    force: str | None = None,
    answers: bool = True,
    progress: bool = True,
    **attributes: Any,
) -> Callable[[Callable[..., Answer | None]], click.Command]:
    """Makes a command of a function that takes validated settings and returns an `Answer`.

    Args:
        group: parent of the command.
        params: its own arguments and options.
        settings: model of its settings, passed as `settings`.
        lanes: whether it takes `LaneSettings`, passed as `lanes`.
        force: help of `--force`; None for no such flag.
        answers: False for a command that runs until a signal.
        progress: whether to show progress and warnings.
        attributes: as for `click.command`.
    """
    models: dict[str, type[Settings]] = {"settings": settings} if settings else {}
    options = [*params, *(setting_options(settings) if settings else ())]
    if force is not None:
        options.append(click.option("--force", is_flag=True, help=force))
    if lanes:
        models["lanes"] = LaneSettings
        options += setting_options(LaneSettings)

    def decorate(function: Callable[..., Answer | None]) -> click.Command:
        wants_output = "output" in inspect.signature(function).parameters

        @wraps(function)
        def run(debug: bool, quiet: bool = False, as_json: bool = False, **values: Any) -> int:
            output: OutputMode = "json" if as_json else "quiet" if quiet else "human"
            for keyword, kind in models.items():
                values[keyword] = _take_settings(kind, values)
            if wants_output:
                values["output"] = output
            origins = (
                settings_given(given_origins(click.get_current_context())) if settings else nullcontext()
            )
            if not answers:
                function(**values)
                return 0
            from virnuc_cli.terminal import show, terminal  # imports rich

            with origins, terminal(output) if progress else nullcontext():
                answer = function(**values)
            assert answer is not None
            show(output, answer.document, answer.summary)
            return answer.exit_code

        made: Any = run
        for option in reversed([*options, *(_OUTPUT if answers else (_DEBUG,))]):
            made = option(made)
        return group.command(**attributes)(made)

    return decorate
