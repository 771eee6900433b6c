"""Numbers as text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from virnuc_core.results.text_table import six_decimals

PROBABILITY = st.floats(0, 1)
NEAR_HALF = st.floats(0.499999, 0.500001)
THRESHOLD = st.floats(0.001, 0.999)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000000"),
        (0.4999994, "0.499999"),
        (0.4999997, "0.499999"),
        (0.49999999, "0.499999"),
        (0.5, "0.500000"),
        (0.50000001, "0.500000"),
        (0.1234565001, "0.123457"),
        (1.0, "1.000000"),
    ],
)
def test_a_number_is_rounded_but_not_across_the_threshold(value: float, text: str) -> None:
    assert six_decimals(value, 0.5) == text


@given(PROBABILITY | NEAR_HALF, st.just(0.5) | THRESHOLD)
@example(0.12345672, 0.1234567)
@example(0.1234563, 0.1234562)
@example(0.9999997, 0.9999999)
def test_what_is_read_is_on_the_side_of_what_was_written(value: float, threshold: float) -> None:
    text = six_decimals(value, threshold)
    assert (float(text) >= threshold) == (value >= threshold)
    assert abs(float(text) - value) < 1.01e-6
    assert len(text) == 8
