"""The benchmark where only the core is installed: `python -m virnuc_core.benchmark --model random:650M ...`.

The options are those of `virnuc bench`. Nothing heavy is imported before it is needed: the processes of the
lanes import this module first, and choose their device before torch.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import Any, get_args

from virnuc_core.benchmark.settings import BenchSettings
from virnuc_core.errors import VirnucError
from virnuc_core.settings import help_text, metavar_of, read_settings


def parse(argv: Sequence[str] | None = None) -> BenchSettings:
    """The settings of a command line with an option for each field of `BenchSettings`.

    Raises:
        UsageError: a value has the wrong type, or settings exclude each other.
    """
    parser = argparse.ArgumentParser("python -m virnuc_core.benchmark", description=__doc__)
    for name, field in BenchSettings.model_fields.items():
        flag, metavar = f"--{name.replace('_', '-')}", metavar_of(field)
        action = "store" if field.default != () else "append"
        choices = None if metavar else get_args(field.annotation)
        kind: dict[str, Any] = {"action": action, "choices": choices, "metavar": metavar}
        if field.annotation is bool:
            kind = {"action": "store_true"}
        parser.add_argument(flag, default=argparse.SUPPRESS, help=help_text(field), **kind)
    return read_settings(BenchSettings, vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints a table, and returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        settings = parse(argv)

        from virnuc_core.benchmark.run import run_benchmark, text_table  # imports torch

        command = shlex.join(["python", "-m", "virnuc_core.benchmark", *settings.arguments()])
        print(text_table(run_benchmark(settings, command)["cases"]))
    except VirnucError as error:
        print(f"virnuc: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
