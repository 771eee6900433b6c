"""The benchmark where only the core is installed: `python -m virnuc_core.benchmark --model random:650M ...`.

The options are those of `virnuc bench`. Nothing heavy is imported before it is needed: the processes of the
lanes import this module first, and choose their device before torch.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence

from virnuc_core.benchmark.settings import OPTIONS, BenchSettings, arguments_of
from virnuc_core.errors import VirnucError


def build_parser() -> argparse.ArgumentParser:
    """A parser of `OPTIONS`."""
    parser = argparse.ArgumentParser(prog="python -m virnuc_core.benchmark", description=__doc__)
    for option in OPTIONS:
        if option.kind is bool:
            parser.add_argument(option.flag, action="store_true", help=option.help)
            continue
        parser.add_argument(
            option.flag,
            type=option.kind,
            default=option.default,
            metavar=option.metavar,
            choices=option.choices or None,
            action="append" if option.multiple else "store",
            help=option.help,
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and returns the exit code."""
    values = vars(build_parser().parse_args(argv))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        settings = BenchSettings.from_options(values)

        from virnuc_core.benchmark.run import run_benchmark  # imports torch
        from virnuc_core.benchmark.table import text_table

        command = shlex.join(["python", "-m", "virnuc_core.benchmark", *arguments_of(values)])
        print(text_table(run_benchmark(settings, command).cases))
    except VirnucError as error:
        print(f"virnuc: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
