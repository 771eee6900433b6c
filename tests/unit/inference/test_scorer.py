"""The head gives every row the same score, whoever its neighbours are."""

import numpy as np
import pytest
import torch

from tests.made_models import WIDTH, MadeModels
from virnuc_core.errors import MismatchError
from virnuc_core.inference.scorer import Scorer
from virnuc_core.models.classifier import load_classifier

RANDOM = np.random.default_rng(0)
DNA = RANDOM.standard_normal((700, WIDTH), np.float32)
PROTEIN = RANDOM.standard_normal((700, WIDTH), np.float32)


def test_scores_are_the_heads(made_models: MadeModels) -> None:
    features = torch.from_numpy(np.concatenate((DNA, PROTEIN), axis=1))
    expected = load_classifier(made_models.head).virus_probabilities(features).numpy()
    np.testing.assert_allclose(Scorer(made_models.head, "cpu").score(DNA, PROTEIN), expected, atol=1e-6)


@pytest.mark.parametrize("rows", [(0, 1), (3, 259), (255, 257), (600, 700), (5, 5)])
def test_neighbours_change_no_bit(made_models: MadeModels, rows: tuple[int, int]) -> None:
    scorer = Scorer(made_models.head, "cpu")
    part = slice(*rows)
    np.testing.assert_array_equal(
        scorer.score(DNA[part], PROTEIN[part]), scorer.score(DNA, PROTEIN)[part], strict=True
    )


def test_another_width_is_refused(made_models: MadeModels) -> None:
    with pytest.raises(MismatchError, match="192"):
        Scorer(made_models.head, "cpu").score(DNA, PROTEIN[:, 1:])
