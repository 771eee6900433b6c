"""End of a training run: model card, plots, and registration in MLflow."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts import show_markdown
from tasks.pages.metrics_page import number
from tasks.pages.model_card import HeadCard, head_card, head_page
from tasks.pages.plots import reliability_figure, roc_figure, save_png
from tasks.stages import resumable_task
from tasks.tracking import MetricPoint, TrackedRun
from virnuc_core.files import write_text
from virnuc_core.results.run_json import RunReport
from virnuc_core.run_folder import RunFolder
from virnuc_core.training.heads import FittedHead, HeadSettings, Labelled, RecordSplit


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReport:
    """Result of a training run; `run` computed the vectors."""

    run: RunReport
    head: FittedHead
    card: str

    @property
    def document(self) -> dict[str, Any]:
        """The document for `--json`."""
        return {
            **self.run.document,
            "head": str(self.head.path),
            "head_fingerprint": self.head.fingerprint,
            "temperature": self.head.trained.temperature,
            "best_epochs": list(self.head.trained.best_epochs),
            "test": {level: asdict(figures) for level, figures in self.head.levels.items()},
        }

    @property
    def summary(self) -> str:
        """A few lines for the terminal."""
        lines = [
            f"test records, {level}: AUROC {number(figures.auroc)}, AUPRC {number(figures.auprc)}, F1 {number(figures.f1)}, "
            f"accuracy {number(figures.accuracy)} ({figures.scored} of {figures.count} with a score)"
            for level, figures in self.head.levels.items()
        ]
        return "\n".join([*lines, f"head: {self.head.path}", f"its card: {card_of(self.head.path)}"])


def card_of(head: Path) -> Path:
    """Path of a head's card."""
    return head.with_suffix(".md")


def head_card_of(run: RunReport, labelled: Labelled, split: RecordSplit, settings: HeadSettings) -> HeadCard:
    """Contents of the card of a training run's head, besides metrics."""
    return HeadCard(
        name=Path(run.out).name,
        plan=run.plan,
        files=labelled.files,
        genbank=labelled.genbank,
        counts=split.counts,
        trainer=settings.trainer,
        sampling={
            "held_out": settings.held_out,
            "group_power": settings.group_power,
            "most_frames": settings.most_frames,
        },
    )


@resumable_task
def publish_head(
    folder: RunFolder, card: HeadCard, head: FittedHead, run: RunReport, tracked: TrackedRun
) -> TrainingReport:
    """Writes the head's card, shows head and metrics in Prefect and MLflow, and registers the model there."""
    for figure, name in ((roc_figure(head.calls), "roc"), (reliability_figure(head.levels), "reliability")):
        save_png(figure, folder.training / f"{name}.png")
    text = head_card(card, head.trained, head.levels)
    write_text(card_of(head.path), text)
    show_markdown("virnuc-head", text, "The head and how good it is")
    for level, figures in head.levels.items():
        tracked.log_metrics({f"test_{level}_{name}": value for name, value in figures.numbers.items()})
    tracked.log_metrics({"temperature": head.trained.temperature})
    now = time.time()
    curves = [
        MetricPoint(key=f"member_{one.member}/{name}", value=value, step=one.epoch, time=now)
        for one in head.trained.history
        for name, value in (("train_loss", one.train_loss), ("validation_loss", one.validation_loss))
        if value is not None
    ]
    tracked.log_points(curves)
    files = ("records.tsv", "figures.json", "roc.png", "reliability.png")
    tracked.log_files([card_of(head.path), *(folder.training / name for name in files)])
    page = head_page(card, head.levels)
    tracked.register_model(card.registered_name, head.path, {"sha256": head.fingerprint}, page)
    tracked.describe(page)
    return TrainingReport(run=run, head=head, card=text)
