"""Figures of contigs are counted as they say."""

import numpy as np
import pytest

from benchmarks.contig_calls import columns_of, measure_contigs
from scripts.train_bundled import evaluation
from scripts.train_bundled.genomes import ANY_VIRUS, CLASSES, Genomes
from virnuc_core.columns import ByteColumn

PHAGE, BACTERIUM = CLASSES.index("prokaryotic virus"), CLASSES.index("bacterium")

# True class, call, tier, p_virus, novelty, class of the call.
CONTIGS = (
    (PHAGE, "virus", "confident", "0.99", "0.01", "prokaryotic virus"),
    (PHAGE, "virus", "likely", "0.80", "0.02", "eukaryotic virus"),
    (PHAGE, "other", "unsure", "0.40", "0.30", "bacterium"),
    (ANY_VIRUS, "virus", "unsure", "0.60", "0.03", "eukaryotic virus"),
    (PHAGE, "unscored", "NA", "NA", "NA", "NA"),
    (BACTERIUM, "other", "confident", "0.01", "0.02", "bacterium"),
    (BACTERIUM, "virus", "likely", "0.70", "0.04", "prokaryotic virus"),
    (BACTERIUM, "other", "likely", "0.10", "0.05", "plasmid"),
)


def genomes_of(classes: list[int]) -> Genomes:
    texts = tuple("" for _ in classes)
    return Genomes(
        bases=ByteColumn.from_strings("ACGT" for _ in classes),
        classes=np.array(classes),
        sources=tuple("bacteria" if number == BACTERIUM else "viral" for number in classes),
        groups=np.arange(len(classes)),
        organisms=texts,
        families=texts,
        genera=texts,
    )


def test_figures_of_contigs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_SAMPLES", {20: 20, 50: 5})
    names = ("call", "tier", "p_virus", "novelty", "class")
    columns = columns_of([dict(zip(names, row[1:], strict=True)) for row in CONTIGS])
    found = measure_contigs(columns, genomes_of([row[0] for row in CONTIGS]))
    assert (found["contigs"], found["viral"], found["share_scored"]) == (8, 5, 0.875)
    # Viruses at 0.99, 0.8, 0.6, 0.4, bacteria at 0.7, 0.1, 0.01; over all, the virus without a score loses to all three.
    assert found["auroc"] == round(10 / 12, 4)
    assert found["everything"] == {
        "recall": 0.6,
        "false_positive_rate": round(1 / 3, 4),
        "precision": 0.75,
        "auroc": round(10 / 15, 4),
    }
    assert found["by_class"]["bacteria"] == {"count": 3, "scored": 3, "called_virus": round(1 / 3, 4)}
    assert found["class_right"] == round(2 / 7, 4)
    # Wrong are the contigs at 0.3 and at 0.04; the 5.6 least novel of seven are all but the two most novel, of which one counts 0.6.
    assert found["novelty"] == {
        "errors": round(2 / 7, 4),
        "errors_least_novel_over_all": pytest.approx(1 / 5.6 * 7 / 2, abs=1e-3),
    }
    assert found["by_tier"]["likely"] == {
        "tier": "likely",
        "contigs": 3,
        "right": 2,
        "called_virus": 2,
        "precision": 0.5,
    }
    assert found["by_tier"]["confident"]["precision"] == 1
    assert [row["contigs"] for row in found["by_probability"]] == [0, 2, 1, 1, 1, 0, 2]
    assert found["by_probability"][2] == {
        "from": 0.7,
        "contigs": 1,
        "right": 0,
        "called_virus": 1,
        "precision": 0.0,
    }
    assert set(found["worst_fdr"]) == {"0.05", "0.1"}
    assert {(row["size"], row["share"]) for row in found["fdr"]} == {
        (size, share) for size in (20, 50) for share in (0.005, 0.02, 0.1, 0.5)
    }
    assert found["worst_fdr"]["0.1"] == max(row["fdr"] for row in found["fdr"] if row["promised"] == 0.1)
