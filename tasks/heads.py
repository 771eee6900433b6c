"""Ends of the runs about heads: the card of a head and the pages of an evaluation, on disk and in Prefect."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts import show_markdown
from tasks.pages.head_pages import evaluation_page, head_card, scores_in_words
from tasks.pages.plots import reliability_figure, roc_figure, save_png
from virnuc_core.files import write_text
from virnuc_core.pipeline import Training
from virnuc_core.run_folder import RunFolder, card_of, run_folder_of
from virnuc_core.training.evaluation import Evaluation
from virnuc_core.training.metrics import KnownCalls, Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadReport:
    """A finished training or evaluation: `document` for `--json`, `summary` for the terminal."""

    document: dict[str, Any]
    summary: str


def publish_training(training: Training) -> HeadReport:
    """Writes the head's card and plots, and shows the card in Prefect."""
    head = training.head
    card = card_of(head.path)
    text = head_card(training)
    write_text(card, text)
    show_markdown("virnuc-head", text, "Model card of the classifier head")
    _draw(RunFolder(run_folder_of(head.path)).training, head.calls, head.levels)
    scores = [f"Test set, {line}" for line in scores_in_words(head.levels)]
    document = {
        **training.run.document,
        "head": str(head.path),
        "head_fingerprint": head.fingerprint,
        "temperature": head.trained.temperature,
        "best_epoch": head.trained.best_epoch,
        "test": {level: asdict(figures) for level, figures in head.levels.items()},
    }
    return HeadReport(
        document=document,
        summary="\n".join([*scores, f"Classifier head: {head.path}", f"Model card: {card}"]),
    )


def publish_evaluation(out: Path, evaluation: Evaluation) -> HeadReport:
    """Writes evaluation.md and the plots, and shows the page in Prefect."""
    page = evaluation_page(evaluation.run.plan, evaluation.levels)
    write_text(out / "evaluation.md", page)
    show_markdown("virnuc-evaluation", page, "Accuracy on labelled sequences")
    _draw(out, evaluation.calls, evaluation.levels)
    scores = scores_in_words(evaluation.levels)
    return HeadReport(document=evaluation.document, summary="\n".join([*scores, f"Results: {out}"]))


def _draw(folder: Path, calls: dict[str, KnownCalls], levels: dict[str, Metrics]) -> None:
    save_png(roc_figure(calls), folder / "roc.png")
    save_png(reliability_figure(levels), folder / "reliability.png")
