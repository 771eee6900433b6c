"""On a GPU too, vectors are bit-identical whatever else is in the batch."""

import pytest

from benchmarks.reliability.batch_mates import measure
from virnuc_core.specs import Precision

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("model", ["random:150M", "random:DNABERT-S"])
def test_the_same_bits_in_any_batch(model: str, precision: Precision) -> None:
    ways = measure(model, precision, "cuda:0", 200)["ways"]
    assert {way: found["other"] for way, found in ways.items()} == dict.fromkeys(ways, 0)
