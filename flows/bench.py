"""`virnuc bench`: how fast models run on this machine."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, Literal

import click

from virnuc_core.benchmark.settings import OPTIONS, BenchSettings, arguments_of


def _options() -> tuple[Any, ...]:
    """The benchmark's own table of options for click."""
    options = []
    for option in OPTIONS:
        if option.kind is bool:
            options.append(click.option(option.flag, is_flag=True, help=option.help))
            continue
        options.append(
            click.option(
                option.flag,
                type=click.Choice(option.choices) if option.choices else option.kind,
                default=option.default,
                metavar=option.metavar,
                multiple=option.multiple,
                help=option.help,
            )
        )
    return tuple(options)


BENCH_OPTIONS: Final = _options()


def run_bench(values: Mapping[str, Any], output: Literal["human", "quiet", "json"]) -> None:
    """`virnuc bench`."""
    from flows.commands import show
    from flows.terminal import terminal
    from virnuc_core.benchmark.run import run_benchmark  # imports torch
    from virnuc_core.benchmark.table import text_table

    settings = BenchSettings.from_options(values)
    command = shlex.join(["virnuc", "bench", *arguments_of(values)])
    with terminal(output):
        result = run_benchmark(settings, command)
    show(output, asdict(result), text_table(result.cases))
