from dataclasses import replace

import torch

from tasks.pages.model_card import HeadCard, head_card, head_page
from tests.made_plans import PLAN
from tests.unit.tasks.test_training_plots import made_calls
from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.specs import InputFile
from virnuc_core.training.heads import PartCounts
from virnuc_core.training.labels import GenBankCounts
from virnuc_core.training.metrics import measure
from virnuc_core.training.split import PARTS
from virnuc_core.training.trainer import TrainedHead, TrainerSettings

CARD = HeadCard(
    name="my_head.safetensors",
    plan=replace(PLAN, kind="train", head=None),
    files=(InputFile(name="a|b.fa", size=1200, sha256="ab" * 32),),
    genbank=GenBankCounts(records=5, left_out=2, prophages=3),
    counts=tuple(
        PartCounts(part=part, class_name=name, is_viral=name == "viral", records=n, groups=n, frames=1000 * n)
        for part, n in zip(PARTS, (8, 1, 2), strict=True)
        for name in ("viral", "other")
    ),
    trainer=TrainerSettings(seed=7),
    sampling={"held_out": 0.1},
)
LEVELS = {"chunks": measure(made_calls(90)), "contigs": measure(made_calls(5, both=False))}


def made_head() -> TrainedHead:
    torch.manual_seed(0)
    return TrainedHead(classifier=MLPClassifier(4), temperature=1.25, history=(), best_epochs=(3, 4))


def test_a_card_says_what_a_head_was_made_of_and_how_good_it_is() -> None:
    card = head_card(CARD, made_head(), LEVELS)
    for said in (
        "ab" * 32,
        "a\\|b.fa",
        *(model.weights_fingerprint for model in PLAN.models),
        "| viral | 8 (8) | 1 (1) | 2 (2) | 8,000 | 1,000 | 2,000 |",
        "| seed | 7 |",
        "| rounds until the best | 3, 4 |",
        "| temperature | 1.2500 |",
        "5 records; 2 left out",
        f"| AUROC | {LEVELS['chunks'].auroc:.3f} | n/a |",
    ):
        assert said in card
    assert card == head_card(CARD, made_head(), LEVELS)


def test_the_short_of_it_fits_on_a_page_of_mlflow() -> None:
    page = head_page(CARD, LEVELS)
    assert "| AUROC |" in page
    assert len(page) < 5000


def test_a_model_is_registered_under_a_name_that_a_registry_takes() -> None:
    models = [replace(model, name="own/er:na me.pt") for model in PLAN.models]
    name = replace(CARD, plan=replace(PLAN, models=tuple(models), chunk_length=300)).registered_name
    assert name == "virnuc-head-own-er-na-me.pt-own-er-na-me.pt-300bp"
