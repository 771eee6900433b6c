import numpy as np
import pytest

from benchmarks.val_auroc import measure_chunks


def test_chunks_without_a_score_count_as_not_called() -> None:
    rows = [
        {"contig": contig, "status": status, "p_virus": p_virus, "call": call}
        for contig, status, p_virus, call in (
            ("v", "scored", "0.9", "virus"),
            ("v", "scored", "0.2", "other"),
            ("v", "no_stretch", "NA", "unscored"),
            ("v", "no_stretch", "NA", "unscored"),
            ("b", "scored", "0.6", "virus"),
            ("b", "scored", "0.1", "other"),
            ("b", "no_stretch", "NA", "unscored"),
        )
    ]
    found = measure_chunks(rows, {"v": "viral", "b": "bacteria"})
    assert (found["chunks"], found["share_scored"]) == (7, round(4 / 7, 4))
    assert found["auroc"] == 0.75
    assert found["by_class"]["viral"] == {"count": 4, "scored": 2, "called_virus": 0.25}
    everything = found["everything"]
    assert everything["recall"] == 0.25
    assert everything["false_positive_rate"] == pytest.approx(1 / 3, abs=1e-4)
    # Of 12 pairs: 0.9 wins 3, 0.2 wins 2, and each of the two without a score ties with the one of the bacteria.
    assert everything["auroc"] == np.round(6 / 12, 4)
