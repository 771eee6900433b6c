"""The tutorial: its commands run as written, and print what it shows."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from scripts.render.tutorial import PAGE, in_folder_with_examples, run, stable, steps

pytestmark = pytest.mark.slow

STEPS = list(steps(PAGE.read_text(encoding="utf-8")))
_NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """Variables of the Python blocks; all blocks run in one folder."""
    assert {step.mark for step in STEPS} == {"bash", "python"}
    assert sum("virnuc " in step.body for step in STEPS) >= 6
    with in_folder_with_examples():
        yield {}


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_step(number: int, names: dict[str, Any], prefect_server: None) -> None:
    step = STEPS[number]
    printed = run(step, names)
    if step.shown is None:
        return
    shown = stable(step.shown)
    assert _NUMBER.sub("#", stable(printed)) == _NUMBER.sub("#", shown)
    # The last digits depend on the processor.
    ours, theirs = (np.array(_NUMBER.findall(text), float) for text in (stable(printed), shown))
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
