"""Pages about heads as Markdown: the model card, the evaluation, and the tables of metrics in both."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Final

from tasks.pages.markdown import cell, code, model_name, number, size, table
from virnuc_core.inference.plan import RunPlan
from virnuc_core.pipeline import Training
from virnuc_core.sequences.frames import LEAST_RESIDUES
from virnuc_core.specs import FRAMES_IN_WORDS, FrameRule, chunks_in_words
from virnuc_core.training.metrics import Metrics
from virnuc_core.training.split import PARTS

_SCALARS: Final = (
    ("sequences", "count"),
    ("scored", "scored"),
    ("viral", "viral"),
    ("AUROC", "auroc"),
    ("AUPRC (average precision)", "auprc"),
    ("F1", "f1"),
    ("precision", "precision"),
    ("recall", "recall"),
    ("accuracy", "accuracy"),
    ("expected calibration error", "ece"),
    ("expected calibration error, classes weighted equally", "ece_balanced"),
    ("true positives", "confusion.viral_called_virus"),
    ("false negatives", "confusion.viral_called_other"),
    ("false positives", "confusion.other_called_virus"),
    ("true negatives", "confusion.other_called_other"),
)
_LIMITS: Final = (
    "Use it only with the models above: with other weights, layers or chunk lengths its scores are meaningless, even if the "
    "embedding widths match.",
    "Accuracy depends on training coverage: the metrics apply to organisms like those in the test set and may be lower for "
    "others.",
    "Sequences that share many 21-mers, or a group in `--groups`, are never split between training and test. More distant "
    "relatives may be, so expect lower accuracy on new families. To measure it, give families as groups.",
    "Scores are probabilities for samples that are half viral, because both classes are weighted equally in training and "
    "calibration. The rarer viruses are in a sample, the more of the viral calls are false.",
)
_FRAME_LIMITS: Final[dict[FrameRule, str]] = {
    "open": "A chunk with a stop codon in all six frames gets no score.",
    "longest": f"A chunk without an ORF of at least {LEAST_RESIDUES} codons gets no score.",
}
_ARCHITECTURE: Final[dict[FrameRule, str]] = {
    "open": "Linear, BatchNorm, ReLU, Dropout 0.5, Linear, as published.",
    "longest": "Each ORF is reduced to 64 features. A chunk is scored from its ORFs, a contig from its ordered chunks, with "
    "convolutions and attention. Trained on contigs of 1 to 24 chunks.",
}


def head_card(training: Training) -> str:
    """The model card of a head, deterministic."""
    plan = training.run.plan
    paragraphs = [
        f"# {cell(Path(training.run.out).name)}",
        f"A classifier head for virnuc. It classifies sequences as viral or non-viral from the embeddings of the "
        f"{FRAMES_IN_WORDS[plan.frames]} of {plan.chunk_length} bp chunks.",
        _command(training),
        *(f"> **Warning:** {warning}" for warning in training.head.warnings),
        "## Models",
        _models(plan),
        "## Data",
        *_data(training),
        "## Training",
        _settings(training),
        f"{_ARCHITECTURE[plan.frames]} Viral and non-viral sequences are sampled equally often; large groups of related sequences are "
        "downsampled. The weights are those of the epoch with the lowest validation loss. The temperature is fitted on the "
        "validation set and stored in the head; it changes no call of a frame or chunk.",
        "## Metrics on the test set",
        "The test set was used neither for training nor for model selection.",
        *_metrics(training.head.levels, "###"),
        "## Limits",
        "\n".join(f"- {limit}" for limit in (*_LIMITS, _FRAME_LIMITS[plan.frames])),
    ]
    return "\n\n".join(paragraphs) + "\n"


def evaluation_page(plan: RunPlan, levels: Mapping[str, Metrics]) -> str:
    """What was evaluated, and its metrics."""
    models = " and ".join(f"{cell(model.name)} ({model.arithmetic})" for model in plan.models)
    paragraphs = [
        f"# Evaluation of {cell(plan.head.name if plan.head else '')}",
        f"Models: {models}. Chunk length: {chunks_in_words(plan.chunk_length)}; {FRAMES_IN_WORDS[plan.frames]}. "
        f"Input: {', '.join(cell(file.name) for file in plan.inputs)}.",
        f"Head: {code(plan.head.fingerprint if plan.head else '')}",
        *_metrics(levels, "##"),
    ]
    return "\n\n".join(paragraphs) + "\n"


def scores_in_words(levels: Mapping[str, Metrics]) -> list[str]:
    """A line per level, for the terminal."""
    return [
        f"{level}: AUROC {number(figures.auroc)}, AUPRC {number(figures.auprc)}, F1 {number(figures.f1)}, "
        f"accuracy {number(figures.accuracy)} ({figures.scored:,} of {figures.count:,} scored)"
        for level, figures in levels.items()
    ]


def _command(training: Training) -> str:
    flags = {"dnabert_s": "--dnabert-model", "esm2": "--esm-model"}
    models = " ".join(f"{flags[model.family]} {model.name}" for model in training.run.plan.models)
    chunks = f"--chunk-length {training.run.plan.chunk_length}"
    return f"    virnuc predict contigs.fa --out run {models} {chunks} --head {Path(training.run.out).name}"


def _models(plan: RunPlan) -> str:
    rows = [
        (
            model_name(model),
            f"{model.spec.embedding_dim}",
            f"{model.repr_layer} of {model.spec.num_layers}",
            model.arithmetic,
            code(model.weights_fingerprint),
        )
        for model in plan.models
    ]
    return table(("model", "dimensions", "layer", "arithmetic", "weights (SHA-256)"), rows)


def _data(training: Training) -> Iterator[str]:
    files = [(cell(file.name), size(file.size), code(file.sha256)) for file in training.labelled.files]
    yield table(("file", "size", "SHA-256"), files)
    genbank = training.labelled.genbank
    if genbank["records"]:
        yield (
            f"GenBank: {genbank['records']:,} records; {genbank['left_out']:,} skipped because the lineage gives no "
            f"label; {genbank['prophages']:,} prophages removed from cellular records."
        )
    rows = []
    for class_name in dict.fromkeys(one.class_name for one in training.split.counts):
        own = {one.part: one for one in training.split.counts if one.class_name == class_name}
        records = [f"{own[part].records:,} ({own[part].groups:,})" for part in PARTS]
        rows.append((cell(class_name), *records, *(f"{own[part].frames:,}" for part in PARTS)))
    columns = [f"{what}: {part}" for what in ("records (groups)", "frames") for part in PARTS]
    yield table(("class", *columns), rows)
    yield "Sequences without any embedding are not counted."


def _settings(training: Training) -> str:
    settings, trained = training.settings.fit, training.head.trained
    rows = [(name.replace("_", " "), f"{value:g}") for name, value in settings.items()]
    temperature = "not calibrated" if trained.temperature is None else f"{trained.temperature:.4f}"
    rows += [
        ("best epoch", f"{trained.best_epoch}"),
        ("temperature", temperature),
    ]
    if trained.contig_temperature is not None:
        intercept, slope = trained.contig_temperature
        rows.append(("temperature of contigs", f"{intercept:.4f} + {slope:.4f} log(scored chunks)"))
    return table(("setting", "value"), rows)


def _metrics(levels: Mapping[str, Metrics], heading: str) -> Iterator[str]:
    scalars = [
        (name, *(number(attrgetter(key)(figures)) for figures in levels.values())) for name, key in _SCALARS
    ]
    yield table(("", *levels), scalars)
    for level, figures in levels.items():
        yield f"{heading} By class: {level}"
        rows = [
            (
                cell(one.name),
                *map(number, (one.count, one.scored, one.called_virus)),
                f"{one.called_virus / one.scored:.1%}" if one.scored else "n/a",
            )
            for one in figures.by_class
        ]
        yield table(("class", "sequences", "scored", "called viral", "fraction"), rows)
