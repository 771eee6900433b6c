"""Model card of a head: data, training, metrics and limits."""

from dataclasses import asdict, dataclass
from typing import Final

from tasks.pages.markdown import cell, code, size, table
from tasks.pages.metrics_page import figures_lines, overview_lines
from virnuc_core.inference.plan import RunPlan
from virnuc_core.specs import Family, InputFile
from virnuc_core.training.heads import PartCounts
from virnuc_core.training.labels import GenBankCounts
from virnuc_core.training.metrics import Metrics
from virnuc_core.training.split import PARTS
from virnuc_core.training.trainer import TrainedHead, TrainerSettings

_FAMILY_NAMES: Final[dict[Family, str]] = {"dnabert_s": "DNABERT-S", "esm2": "ESM-2"}
_LIMITS: Final = (
    "It belongs to the models above: on the vectors of other weights, layers or chunk lengths its scores mean nothing, even "
    "where the widths fit.",
    "It knows what it was shown. The figures hold for organisms like those of the test records; organisms of other groups "
    "may be called worse.",
    "Records that share many 21-mers, or a group in `--groups`, are never on both sides of the split. More distant "
    "relatives can be: figures for new families are lower. Give families as groups to see how much.",
    "Scores are probabilities where half of what is scored is viral: it is fitted and calibrated with both classes "
    "weighted alike. Where viruses are rare, more of what is called virus is not.",
)


_CLOSED_LIMITS: Final = {
    False: "A chunk whose six frames all have a stop codon has no score.",
    True: "It is for chunks whose six frames all have a stop codon, and was shown no others. The DNA alone tells less than "
    "DNA and protein.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCard:
    """Contents of a card besides metrics.

    Attributes:
        name: file name of the head.
        plan: of the run that made the vectors.
        genbank: what was found in the GenBank files.
        counts: records per class in each part of the split.
        trainer: hyperparameters.
        sampling: other settings, by name.
    """

    name: str
    plan: RunPlan
    files: tuple[InputFile, ...]
    genbank: GenBankCounts
    counts: tuple[PartCounts, ...]
    trainer: TrainerSettings
    sampling: dict[str, float]

    @property
    def is_dna_alone(self) -> bool:
        """Whether the head takes only the DNA vector."""
        return self.plan.model("esm2") is None

    @property
    def registered_name(self) -> str:
        """Name in the model registry, shared by interchangeable heads."""
        models = "-".join(model.name for model in self.plan.models)
        allowed = "".join(c if c.isalnum() or c in "._-" else "-" for c in models)
        return f"virnuc-head-{allowed}-{self.plan.chunk_length}bp{'-dna-alone' if self.is_dna_alone else ''}"


def head_card(card: HeadCard, trained: TrainedHead, levels: dict[str, Metrics]) -> str:
    """The card as Markdown, deterministic; `levels` are metrics on the test records, of chunks and of contigs."""
    lines = [
        f"# {cell(card.name)}",
        "",
        f"A classifier head for virnuc: viral or not, from the {'DNA ' if card.is_dna_alone else ''}vectors of chunks of "
        f"{card.plan.chunk_length} bp{' without a stop-free frame' if card.is_dna_alone else ''}.",
        "",
        *_use(card),
        "",
        "## Models",
        "",
        *_models(card),
        "",
        "## Data",
        "",
        *_data(card),
        "",
        "## Training",
        "",
        *_training(card, trained),
        "",
        "## Metrics on the test records",
        "",
        "Nothing was chosen by their help: they were neither learnt from nor looked at while the head was fitted.",
        "",
        *figures_lines(levels, "###"),
        "## Limits",
        "",
        *(f"- {limit}" for limit in (*_LIMITS, _CLOSED_LIMITS[card.is_dna_alone])),
    ]
    return "\n".join(lines) + "\n"


def head_page(card: HeadCard, levels: dict[str, Metrics]) -> str:
    """A summary for pages limited to a few thousand characters."""
    heading = f"# {cell(card.name)}: chunks of {card.plan.chunk_length} bp"
    return (
        "\n".join([heading, "", *_use(card), "", "On the test records:", "", *overview_lines(levels)]) + "\n"
    )


def _use(card: HeadCard) -> list[str]:
    flags = {"dnabert_s": "--dnabert-model", "esm2": "--esm-model"}
    models = " ".join(f"{flags[model.family]} {model.name}" for model in card.plan.models)
    head = "--dna-head" if card.is_dna_alone else "--head"
    return [
        f"    virnuc predict contigs.fa --out run {models} --chunk-length {card.plan.chunk_length} {head} {card.name}"
    ]


def _models(card: HeadCard) -> list[str]:
    rows = [
        (
            f"{_FAMILY_NAMES[model.family]} {cell(model.name)}",
            f"{model.spec.embedding_dim}",
            f"{model.repr_layer} of {model.spec.num_layers}",
            model.arithmetic,
            code(model.weights_fingerprint),
        )
        for model in card.plan.models
    ]
    return table(("model", "dimensions", "layer", "arithmetic", "weights (SHA-256)"), rows)


def _data(card: HeadCard) -> list[str]:
    files = [(cell(file.name), size(file.size), code(file.sha256)) for file in card.files]
    lines = [*table(("file", "size", "SHA-256"), files), ""]
    if card.genbank.records:
        lines += [
            f"GenBank: {card.genbank.records:,} records; {card.genbank.left_out:,} left out, whose lineage does not say what "
            f"they are; {card.genbank.prophages:,} prophages cut out of cellular records.",
            "",
        ]
    rows = []
    for class_name in dict.fromkeys(one.class_name for one in card.counts):
        own = {one.part: one for one in card.counts if one.class_name == class_name}
        cells = [f"{own[part].records:,} ({own[part].groups:,})" for part in PARTS]
        cells += [f"{own[part].frames:,}" for part in PARTS]
        rows.append((cell(class_name), *cells))
    header = (
        "class",
        *(f"records (groups): {part}" for part in PARTS),
        *(f"frames: {part}" for part in PARTS),
    )
    lines += table(header, rows)
    lines += ["", "Records without a stop-free frame are not counted."]
    return lines


def _training(card: HeadCard, trained: TrainedHead) -> list[str]:
    settings = {**asdict(card.trainer), **card.sampling}
    rows = [(name.replace("_", " "), f"{value:g}") for name, value in settings.items()]
    rows += [
        ("rounds until the best", ", ".join(f"{best}" for best in trained.best_epochs)),
        ("temperature", f"{trained.temperature:.4f}"),
    ]
    return [
        *table(("setting", "value"), rows),
        "",
        "Linear, BatchNorm, ReLU, Dropout 0.5, Linear, as published. Both classes are drawn equally often, groups of "
        "related records less often than their size says. The weights are those of the round with the smallest loss on "
        "the validation records; the temperature, fitted to these, is part of the output layer and changes no call of a "
        "frame or a chunk.",
    ]
