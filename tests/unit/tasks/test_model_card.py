from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.heads import registered_name
from tasks.pages.head_pages import head_card, head_page
from tests.made_lanes import counters
from tests.made_plans import PLAN
from tests.unit.tasks.test_training_plots import made_calls
from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.pipeline import LanesHere, Training
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig
from virnuc_core.specs import InputFile
from virnuc_core.training.heads import FittedHead, HeadSettings, Labelled, PartCounts, RecordSplit
from virnuc_core.training.labels import GenBankCounts, LabelledFiles, RecordTable
from virnuc_core.training.metrics import measure
from virnuc_core.training.split import PARTS
from virnuc_core.training.trainer import TrainedHead, TrainerSettings

LEVELS = {"chunks": measure(made_calls(90)), "contigs": measure(made_calls(5, both=False))}


@pytest.fixture
def run(tmp_path: Path) -> Training:
    files = LabelledFiles(viral=("a|b.fa",), other=())
    settings = HeadSettings(trainer=TrainerSettings(seed=7), held_out=0.1, group_power=0.5, most_frames=100)
    made = Training(
        RunFolder(tmp_path),
        RunConfig(),
        files,
        groups=None,
        settings=settings,
        lanes=LanesHere(("cpu",)),
        out="my_head.safetensors",
    )
    made.plan = replace(PLAN, kind="train", head=None)
    made.labelled = Labelled(
        files=(InputFile(name="a|b.fa", size=1200, sha256="ab" * 32),),
        sources=(),
        table=RecordTable(
            names=(),
            classes=np.empty(0, np.int64),
            class_names=(),
            lengths=np.empty(0, np.int64),
            groups=np.empty(0, np.int64),
        ),
        genbank=GenBankCounts(records=5, left_out=2, prophages=3),
    )
    counts = [
        PartCounts(part=part, class_name=name, is_viral=name == "viral", records=n, groups=n, frames=1000 * n)
        for part, n in zip(PARTS, (8, 1, 2), strict=True)
        for name in ("viral", "other")
    ]
    made.split = RecordSplit(part=np.empty(0, np.int8), counts=tuple(counts))
    torch.manual_seed(0)
    made.head = FittedHead(
        path=Path("my_head.safetensors"),
        fingerprint="",
        trained=TrainedHead(classifier=MLPClassifier(4), temperature=1.25, history=(), best_epochs=(3, 4)),
        calls={},
        work=counters(),
    )
    return made


def test_a_card_says_what_a_head_was_made_of_and_how_good_it_is(run: Training) -> None:
    card = head_card(run, LEVELS)
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
    assert card == head_card(run, LEVELS)


def test_the_short_of_it_fits_on_a_page_of_mlflow(run: Training) -> None:
    page = head_page(run, LEVELS)
    assert "| AUROC |" in page
    assert len(page) < 5000


def test_a_model_is_registered_under_a_name_that_a_registry_takes() -> None:
    models = [replace(model, name="own/er:na me.pt") for model in PLAN.models]
    name = registered_name(replace(PLAN, models=tuple(models), chunk_length=300))
    assert name == "virnuc-head-own-er-na-me.pt-own-er-na-me.pt-300bp"
