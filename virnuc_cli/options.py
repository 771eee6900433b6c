"""Building blocks of commands: a decorator, options made from settings models, and one form of answer."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

import click

if TYPE_CHECKING:
    from virnuc_cli.terminal import OutputMode
    from virnuc_core.settings import Settings

# Of every command, since click keeps the help flags of its first context, which may have no parent.
CONTEXT_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_ALL: Final = "virnuc.help-all"


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
        """Lists the commands as they are defined; click would sort them, and truncate their descriptions."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(1000)) for name, one in self.commands.items()])


class Command(click.Command):
    """A command whose options are made when they are needed, since those of settings import pydantic.

    Its repeatable flags accept several values: `--viral a.fa b.fa` is `--viral a.fa --viral b.fa`.

    Attributes:
        models: names in `virnuc_core.settings` of the classes of its settings.
    """

    def __init__(
        self, make_params: Callable[[], list[click.Parameter]], models: Sequence[str] = (), **attributes: Any
    ) -> None:
        self._make_params = cache(make_params)
        self.models = models
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
        repeatable = [param for param in self.params if isinstance(param, click.Option) and param.multiple]
        flags = {flag for option in repeatable for flag in option.opts}
        spread: list[str] = []
        flag = ""
        for place, argument in enumerate(args):
            if argument == "--":
                return super().parse_args(ctx, [*spread, *args[place:]])
            if argument.startswith("-") and argument != "-":
                flag = argument if argument in flags else ""
            elif flag and spread[-1] != flag:
                spread.append(flag)
            spread.append(argument)
        return super().parse_args(ctx, spread)


class RareOption(click.Option):
    """An option that only --help-all lists."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if _ALL in ctx.meta else None


def _show_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _help_all() -> click.Option:
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show all options.",
    )


def setting_options(model: "type[Settings]") -> list[click.Option]:
    """The options of a settings model, its own before inherited ones; values are checked with those of variables and files."""
    from virnuc_core.settings import in_words

    # Others are listed by --help-all only.
    common = (
        "preset",
        "chunk_length",
        "threshold",
        "fdr",
        "relaxed",
        "esm_model",
        "dnabert_model",
        "head",
        "groups",
        "devices",
        "threads",
    )
    metavars = {
        **dict.fromkeys(("esm_model", "dnabert_model"), "NAME|PATH"),
        **{"head": "PATH", "groups": "TABLE", "devices": "auto|cpu|0,1,..."},
    }
    fields = model.model_fields
    own_first = (name for owner in model.__mro__ for name in inspect.get_annotations(owner) if name in fields)
    options = []
    for name in dict.fromkeys(own_first):
        field, flag = fields[name], name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}" if field.annotation is bool else f"--{flag}"]
        default = in_words(field)
        option = (click.Option if name in common else RareOption)(
            ["-t", *names] if name == "threads" else names,
            default=None,
            metavar=metavars.get(name) or "|".join(_values(field.annotation)),
            help=f"{field.description}{default and f' [{default}]'}.",
        )
        options.append(option)
    return options


def _values(annotation: Any) -> list[str]:
    """What may be given for a type: choices, N for a whole number, X for another one."""
    arms = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [*arms]
    if get_origin(annotation) is Annotated:
        return _values(arms[0])
    if arms:
        return [value for arm in arms for value in _values(arm)]
    return {int: ["N"], float: ["X"], str: ["TEXT"]}.get(annotation, [])


def command(
    group: click.Group,
    *params: click.Parameter,
    name: str = "",
    settings: str = "",
    is_run: bool = False,
    answers: bool = True,
) -> Callable[[Callable[..., Answer | None]], Command]:
    """Makes a command of a function that takes validated settings and returns an `Answer`.

    Progress and warnings are shown while it runs, unless it takes `output` and so shows what it does itself.

    Args:
        group: parent of the command.
        params: its own arguments and options.
        name: the function's by default.
        settings: class in `virnuc_core.settings`; passed as `settings`.
        is_run: it makes a run: `--force` and `--threads`.
        answers: False for a command that runs until a signal.
    """
    models = [*filter(None, [settings]), *(["ProcessSettings"] if is_run else [])]
    rare = RareOption if settings else click.Option

    def make_params() -> list[click.Parameter]:
        made = [*params]
        for model in models:
            made += setting_options(resolve_name(f"virnuc_core.settings:{model}"))
        if is_run:
            made.append(click.Option(["--force"], is_flag=True, help="Overwrite existing results."))
        if answers:
            made.append(rare(["--quiet"], is_flag=True, help="Print warnings and errors only."))
            made.append(rare(["--json", "as_json"], is_flag=True, help="Print the result as JSON."))
        made.append(rare(["--debug"], is_flag=True, help="Show the traceback on errors."))
        return [*made, _help_all()] if settings else made

    def decorate(function: Callable[..., Answer | None]) -> Command:
        made = Command(
            make_params,
            models,
            name=name or function.__name__,
            callback=partial(_run, function, settings),
            help=function.__doc__,
            context_settings=CONTEXT_SETTINGS,
        )
        group.add_command(made)
        return made

    return decorate


def iter_commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name."""
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from iter_commands(found, f"{path}{name} ")
        else:
            yield f"{path}{name}", found


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

    with ExitStack() as stack:
        if settings_model:
            from virnuc_cli.sources import reading  # imports pydantic-settings

            kind = resolve_name(f"virnuc_core.settings:{settings_model}")
            names = {*kind.model_fields, "threads"} & values.keys()
            taken = {name: values.pop(name) for name in names}
            flags = {name: value for name, value in taken.items() if value is not None}
            values["settings"] = stack.enter_context(reading(kind, flags))
        require_utf8(*_texts(value for name, value in values.items() if name != "settings"))
        if as_json is None:
            function(**values)
            return 0
        from virnuc_cli.terminal import show, terminal

        output: OutputMode = "json" if as_json else "quiet" if quiet else "human"
        if "output" in inspect.signature(function).parameters:
            values["output"] = output
        else:
            stack.enter_context(terminal(output))
        answer = function(**values)
    assert answer is not None
    show(output, answer.document, answer.summary)
    return answer.exit_code
