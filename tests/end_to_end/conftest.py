"""Small random checkpoints, input sequences, and one Prefect server for all flow tests."""

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.tracking import TrackedRun
from tests.forked_lanes import ForkedContext
from tests.made_models import make_spec, write_model
from virnuc_cli.main import main
from virnuc_core.models.classifier import MLPClassifier


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
    esm2, dnabert = make_spec("esm2", embedding_dim=32), make_spec("dnabert_s")
    write_model(folder / "esm2_random", esm2)
    write_model(folder / "dnabert_random", dnabert)
    for seed in (1, 2):
        torch.manual_seed(seed)
        head = MLPClassifier(esm2.embedding_dim + dnabert.embedding_dim)
        save_file(head.state_dict(), folder / f"head_{seed}.safetensors")
    return Checkpoints(
        esm=folder / "esm2_random",
        dnabert=folder / "dnabert_random",
        head=folder / "head_1.safetensors",
        other_head=folder / "head_2.safetensors",
    )


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


@pytest.fixture
def fast_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks lanes from this process; tests/unit, tests/crash and tests/production test spawned ones."""
    get_context = multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing,
        "get_context",
        lambda method=None: ForkedContext() if method == "spawn" else get_context(method),
    )


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
