"""Small models with random weights, and sequences."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from virnuc_core.inference import runner
from virnuc_core.inference.lanes import ignore
from virnuc_core.inference.plan import Kind, RunPlan
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.runner import LoadedModels, load_planned_head, run_shards
from virnuc_core.inference.sharding import SHARD_SECONDS
from virnuc_core.models.catalogue import chunks_of
from virnuc_core.models.checkpoint import (
    DNABERT,
    TOKEN_TYPE,
    TRANSFORMERS_ESM,
    Checkpoint,
    config_sizes,
    load_model,
    parameter_shapes,
)
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.heads import ContigHead, Head, HeadSpec, MLPClassifier, save_head
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Family, ModelSpec, ResolvedPrecision

GOLDEN = Path(__file__).parent / "data" / "golden"
ESM2 = GOLDEN / "esm2" / "esm2_t4_made.pt"
WIDTH = 96
# No open reading frame in any window of 60 bases.
NO_OPEN_FRAME = "TTAATTAACTAGCTAG" * 12


@dataclass(frozen=True)
class MadeModels:
    """Paths of an ESM-2, a DNABERT-S and a head for both."""

    esm2: Path
    dnabert: Path
    head: Path

    @property
    def longest_head(self) -> Path:
        """A head for the longest ORFs, in the same folder."""
        return self.head.with_name("longest.safetensors")

    @property
    def flags(self) -> tuple[str, ...]:
        """`virnuc predict` flags."""
        models = ("--esm-model", str(self.esm2), "--dnabert-model", str(self.dnabert))
        return (*models, "--head", str(self.head), "--devices", "cpu")

    def config(self, **changes: object) -> RunConfig:
        """A predict run with these models and 60-bp chunks."""
        settings = {
            "chunk_length": 60,
            "esm_model": str(self.esm2),
            "dnabert_model": str(self.dnabert),
            "head": str(self.head),
            "devices": ("cpu",),
        }
        return RunConfig(**{**settings, **changes})


def make_models(folder: Path) -> MadeModels:
    """The golden models, with a new tokenizer and head."""
    dnabert = folder / "dnabert"
    shutil.copytree(GOLDEN / "dnabert_s", dnabert, ignore=shutil.ignore_patterns("*.npz"))
    make_tokenizer(dnabert / "tokenizer.json")
    made = MadeModels(ESM2, dnabert, make_head(folder / "head.safetensors", 2 * WIDTH))
    save_head(make_contig_head(WIDTH, WIDTH), made.longest_head, {})
    return made


@dataclass(frozen=True)
class MadeRun:
    """A planned run in any state."""

    folder: RunFolder
    store: FrameStore
    plan: RunPlan
    device: str = "cpu"

    @property
    def head(self) -> Head:
        assert self.plan.head is not None
        return load_planned_head(self.plan.head)

    def compute(self, indices: Sequence[int] | None = None) -> None:
        """Computes shards in this process, by default all."""
        chosen = range(len(self.plan.shards)) if indices is None else indices
        run_shards(self.folder, chosen, LoadedModels(self.device), 0, ignore)


def copy_of(run: MadeRun, root: Path) -> MadeRun:
    """A run that a test may change."""
    folder = RunFolder(shutil.copytree(run.folder.root, root))
    return MadeRun(folder, FrameStore.open(folder.frames), run.plan, run.device)


def write_results(run: MadeRun) -> None:
    """All files of a computed run except its report."""
    aggregate(run.folder, run.plan, run.store)
    write_tables(run.folder, run.store, run.head, run.plan.calls)


def plan_run(
    root: Path,
    fasta: Path,
    config: RunConfig,
    *,
    kind: Kind = "predict",
    shard_seconds: float = 0.05,
    device: str = "cpu",
) -> MadeRun:
    """Indexes and plans a run with small shards, so that there are several."""
    folder = RunFolder(root)
    root.mkdir(exist_ok=True)
    alphabet = "protein" if config.dnabert_model is None else "dna"
    rule, frames = chunks_of(config) if kind == "predict" else (config.chunk_length, "open")
    assert rule != "auto"
    store = build_frame_store([fasta], folder.frames, rule, alphabet, frames=frames)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHARD_SECONDS, device.partition(":")[0], shard_seconds)
        plan = open_plan(config, store, kind, (device,), folder)
    return MadeRun(folder, store, plan, device)


def make_spec(family: Family, **changes: object) -> ModelSpec:
    """A small architecture."""
    spec = ModelSpec(
        family=family,
        num_layers=2,
        embedding_dim=24,
        num_heads=2,
        ffn_dim=48,
        vocab_size=33 if family == "esm2" else 73,
        layer_norm_eps=1e-5 if family == "esm2" else 1e-12,
        token_dropout=family == "esm2",
    )
    return replace(spec, **changes)


def published_config(spec: ModelSpec) -> dict[str, object]:
    """The content of config.json."""
    config = config_sizes(spec)
    if spec.family == "dnabert_s":
        return config | {"model_type": "bert"}
    return config | {"model_type": "esm", "position_embedding_type": "rotary", "token_dropout": True}


def write_model(folder: Path, spec: ModelSpec, seed: int = 0) -> Path:
    """Random weights in the layout of a published folder."""
    layout = TRANSFORMERS_ESM if spec.family == "esm2" else DNABERT
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(spec).items():
        sources = layout.sources(name)
        rows = (2, *shape) if name == TOKEN_TYPE else (shape[0] // len(sources), *shape[1:])
        state |= {source: torch.randn(rows, generator=generator) * 0.2 for source in sources}
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published_config(spec)))
    if spec.family == "dnabert_s":
        make_tokenizer(folder / "tokenizer.json")
    return folder


def make_esm2(folder: Path, *, num_layers: int = 4, width: int = WIDTH, seed: int = 0) -> Path:
    """An ESM-2 like the golden one."""
    spec = make_spec("esm2", num_layers=num_layers, embedding_dim=width, num_heads=4, ffn_dim=2 * width)
    return write_model(folder, spec, seed)


def make_head(path: Path, width: int, seed: int = 0, bias: float = 2.98) -> Path:
    """Random weights; with this bias both classes are called on the golden models' vectors."""
    torch.manual_seed(seed)
    head = MLPClassifier(width)
    torch.nn.init.normal_(head.output_layer.weight, std=0.3)
    torch.nn.init.zeros_(head.output_layer.bias)
    with torch.no_grad():
        head.output_layer.bias[1] = bias
    save_file(head.state_dict(), path)
    return path


def make_contig_head(dna_width: int, protein_width: int, seed: int = 0) -> ContigHead:
    """Random weights; with these biases chunks and contigs get both calls on the golden models' vectors."""
    torch.manual_seed(seed)
    classes = ("phage", "other virus", "bacterium", "plasmid")
    spec = HeadSpec(dna_width=dna_width, protein_width=protein_width, classes=classes, num_virus=2)
    head = ContigHead(spec)
    with torch.no_grad():
        for layer, bias in ((head.chunk[-1], 31.9), (head.context, 6.0), (head.contig[-1], 17.2)):
            layer.weight.mul_(100)
            layer.bias[:2] += bias
        head.chunk_temperature.fill_(1.5)
        head.context_temperature.fill_(1.1)
        head.contig_temperature.copy_(torch.tensor([1.2, 0.3]))
    return head.requires_grad_(False).eval()


def write_contigs(
    path: Path, num_records: int = 40, seed: int = 0, lengths: Sequence[int] = (30, 60, 150, 400)
) -> Path:
    """Random contigs in FASTA, some without a open reading frame."""
    letters = random.Random(seed)
    with path.open("w") as file:
        for number in range(num_records):
            length = letters.choice(lengths)
            sequence = "".join(letters.choices("ACGT", k=length))
            if number % 7 == 3:
                sequence = NO_OPEN_FRAME
            file.write(f">contig{number % 37}\n{sequence}\n")
    return path


def tokenizer(words: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Byte pairs of a few DNA words, whose ids are their places; [CLS] is 1 and [SEP] 2."""
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), unk_token="[UNK]"))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def make_tokenizer(path: Path) -> None:
    """Byte pairs of a few DNA words, with the ids of the published special tokens."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "A", "C", "G", "T", "AC", "GT", "AA", "ACGT"]
    made = tokenizer(words, [("A", "C"), ("G", "T"), ("A", "A"), ("AC", "GT")])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))


def record_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that are loaded from now on."""
    names: list[str] = []

    def load(
        checkpoint: Checkpoint, device: torch.device | str, precision: ResolvedPrecision, **_: object
    ) -> Encoder:
        names.append(checkpoint.name)
        return load_model(checkpoint, device, precision)

    monkeypatch.setattr(runner, "load_model", load)
    return names
