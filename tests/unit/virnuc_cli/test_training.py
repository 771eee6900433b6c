from typing import Any

import click
import pytest

from virnuc_cli.options import with_options
from virnuc_cli.training import LABELLED_OPTIONS, SpreadCommand

CASES = {
    "--viral a b --other c": (("a", "b"), ("c",), ()),
    "x --viral a": (("a",), (), ("x",)),
    "--viral a --viral b c": (("a", "b", "c"), (), ()),
    "--viral=a x": (("a",), (), ("x",)),
    "--labels t x y": ((), (), ("x", "y")),
    "--viral a -- x y": (("a",), (), ("x", "y")),
    "--viral a - --other c": (("a", "-"), ("c",), ()),
}


@pytest.mark.parametrize("line", CASES)
def test_files_after_a_flag_belong_to_it(line: str) -> None:
    given: dict[str, Any] = {}

    @click.command(cls=SpreadCommand)
    @with_options(*LABELLED_OPTIONS)
    def command(**values: Any) -> None:
        given.update(values)

    command.main(args=line.split(), standalone_mode=False)
    assert (given["viral"], given["other"], given["labelled"]) == CASES[line]
