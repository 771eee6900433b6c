"""The benchmark where only the core is installed: `python -m virnuc_core.benchmark --model random:650M ...`.

The options are those of `virnuc bench`. Nothing heavy is imported before it is needed: the processes of the
lanes import this module first, and choose their device before torch.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import get_args

from pydantic import ValidationError

from virnuc_core.benchmark.settings import BenchSettings
from virnuc_core.errors import VirnucError


def build_parser() -> argparse.ArgumentParser:
    """An option for each field of `BenchSettings`, which also converts and checks the values."""
    parser = argparse.ArgumentParser(
        prog="python -m virnuc_core.benchmark", description=__doc__, argument_default=argparse.SUPPRESS
    )
    for name, field in BenchSettings.model_fields.items():
        flag, extra = f"--{name.replace('_', '-')}", field.json_schema_extra
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=field.description)
            continue
        parser.add_argument(
            flag,
            action="append" if isinstance(field.default, tuple) else "store",
            choices=None if extra else get_args(field.annotation),
            metavar=str(extra["metavar"]) if isinstance(extra, dict) else None,
            help=field.description,
        )
    return parser


def parse(argv: Sequence[str] | None = None) -> BenchSettings:
    """The settings of a command line.

    Raises:
        SystemExit: a value has the wrong type.
        UsageError: settings that exclude each other.
    """
    parser = build_parser()
    try:
        return BenchSettings(**vars(parser.parse_args(argv)))
    except ValidationError as error:
        first = error.errors()[0]
        parser.error(f"argument --{str(first['loc'][0]).replace('_', '-')}: {first['msg']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        settings = parse(argv)

        from virnuc_core.benchmark.report import text_table
        from virnuc_core.benchmark.run import run_benchmark  # imports torch

        command = shlex.join(["python", "-m", "virnuc_core.benchmark", *settings.arguments()])
        print(text_table(run_benchmark(settings, command)["cases"]))
    except VirnucError as error:
        print(f"virnuc: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
