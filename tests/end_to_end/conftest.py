"""Small random checkpoints, input sequences, and one Prefect server for all flow tests."""

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tasks.tracking import TrackedRun
from virnuc_cli.main import main
from virnuc_core.models.checkpoint import DNABERT, TOKEN_TYPE, TRANSFORMERS_ESM, parameter_shapes
from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.specs import ModelSpec

ESM_SPEC = ModelSpec(
    family="esm2",
    num_layers=2,
    embedding_dim=32,
    num_heads=2,
    ffn_dim=64,
    vocab_size=33,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
DNABERT_SPEC = ModelSpec(
    family="dnabert_s",
    num_layers=2,
    embedding_dim=24,
    num_heads=2,
    ffn_dim=48,
    vocab_size=73,
    layer_norm_eps=1e-12,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    esm: Path
    dnabert: Path
    head: Path
    other_head: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """`virnuc predict` flags."""
        models = ("--esm-model", str(self.esm), "--dnabert-model", str(self.dnabert))
        return (*models, "--head", str(self.head), "--devices", "cpu")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, spec in (("esm2_random", ESM_SPEC), ("dnabert_random", DNABERT_SPEC)):
        (folder / name).mkdir()
        save_file(_random_tensors(spec), folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(_config(spec)))
    _tokenizer().save(str(folder / "dnabert_random" / "tokenizer.json"))
    width = ESM_SPEC.embedding_dim + DNABERT_SPEC.embedding_dim
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_file(MLPClassifier(width).state_dict(), folder / f"head_{seed}.safetensors")
    return Checkpoints(
        esm=folder / "esm2_random",
        dnabert=folder / "dnabert_random",
        head=folder / "head_1.safetensors",
        other_head=folder / "head_2.safetensors",
    )


def _random_tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """All parameters, named as in published folders."""
    layout = TRANSFORMERS_ESM if spec.family == "esm2" else DNABERT
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(spec).items():
        torch.manual_seed(zlib.crc32(name.encode()))
        parts = layout.sources(name)
        rows = (2, *shape) if name == TOKEN_TYPE else (shape[0] // len(parts), *shape[1:])
        for part in parts:
            tensors[part] = torch.randn(rows) * 0.2
    return tensors


def _config(spec: ModelSpec) -> dict[str, object]:
    common = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.embedding_dim,
        "num_attention_heads": spec.num_heads,
        "intermediate_size": spec.ffn_dim,
        "vocab_size": spec.vocab_size,
        "layer_norm_eps": spec.layer_norm_eps,
    }
    if spec.family == "esm2":
        return {**common, "model_type": "esm", "position_embedding_type": "rotary", "token_dropout": True}
    return {**common, "model_type": "bert"}


def _tokenizer() -> Tokenizer:
    """Bases, pairs and 4-mers, in the format of a published DNABERT-S tokenizer."""
    specials = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    pairs = [(a, b) for a in "ACGT" for b in "ACGT"]
    words = [(f"{a}{b}", f"{b}{a}") for a, b in pairs]
    pieces = [*specials, *"ACGT", *map("".join, pairs), *map("".join, words)]
    pieces += [f"[unused{i}]" for i in range(DNABERT_SPEC.vocab_size - len(pieces))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [*pairs, *words], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(specials)
    return tokenizer


def random_dna(length: int, seed: int) -> str:
    """Bases without a stop in frame 1, so that every chunk of 3k bases has a stop-free frame."""
    generator = random.Random(seed)
    codons = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT"]
    stops = {"TAA", "TAG", "TGA"}
    return "".join(generator.choices([codon for codon in codons if codon not in stops], k=length // 3))


@pytest.fixture(scope="session")
def contigs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven contigs; one is rejected, and one has no stop-free frame."""
    path = tmp_path_factory.mktemp("contigs") / "contigs.fa"
    records = [(f"contig_{i} made", random_dna(900 + 300 * i, seed=i)) for i in range(5)]
    records += [("closed", "TAATTAGTTAATTAGTTAA" * 6), ("not_dna", "QQQQQQQQQQQQEFILPQEFILPQ")]
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records))
    return path


@pytest.fixture(scope="session")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proteins") / "proteins.faa"
    generator = random.Random(0)
    lines = [
        f">protein_{i}\n{''.join(generator.choices('ACDEFGHIKLMNPQRSTVWY', k=30 + 7 * i))}" for i in range(9)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take half the time of a small run; overridden where they are tested."""
    monkeypatch.setattr(TrackedRun, "log_figure", lambda *_: None)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    # As on the command line: ending the heartbeat takes a second per flow and lane.
    no_heartbeat = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with prefect_test_harness(server_startup_timeout=120), no_heartbeat:
        yield


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


class CommandLine:
    """Runs `virnuc` in this process and captures its output."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: str | Path) -> Result:
        self._capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = self._capfd.readouterr()
        return Result(code, out, err)


@pytest.fixture
def virnuc(capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capfd)


@pytest.fixture
def virnuc_flows(prefect_server: None, virnuc: CommandLine) -> CommandLine:
    return virnuc


def rows(path: Path) -> Sequence[Sequence[str]]:
    """Lines of a TSV file."""
    return [line.split("\t") for line in path.read_text().splitlines()]
