"""Small models, inputs, a finished run, the command line, and one Prefect server for all flow tests."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.forked_lanes import fork_lanes
from tests.made_models import WIDTH, MadeModels, make_esm2, make_head, make_models
from virnuc_cli.main import main
from virnuc_core.inference import sharding

Value = TypeVar("Value")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> MadeModels:
    """ESM-2 and DNABERT-S as folders, and a head for both."""
    folder = tmp_path_factory.mktemp("models")
    made = make_models(folder)
    return MadeModels(make_esm2(folder / "esm2", num_layers=2), made.dnabert, made.head)


@pytest.fixture(scope="session")
def other_head(models: MadeModels) -> Path:
    return make_head(models.head.with_name("other_head.safetensors"), 2 * WIDTH, seed=1)


def random_dna(length: int, seed: int) -> str:
    """Bases without a stop in frame 1, so that every chunk of 3k bases has a open reading frame."""
    generator = random.Random(seed)
    codons = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT"]
    stops = {"TAA", "TAG", "TGA"}
    return "".join(generator.choices([codon for codon in codons if codon not in stops], k=length // 3))


@pytest.fixture(scope="session")
def contigs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven contigs; one is rejected, and one has no open reading frame."""
    path = tmp_path_factory.mktemp("contigs") / "contigs.fa"
    records = [(f"contig_{i} made", random_dna(900 + 300 * i, seed=i)) for i in range(5)]
    records += [("closed", "TAATTAGTTAATTAGTTAA" * 6), ("not_dna", "QQQQQQQQQQQQEFILPQEFILPQ")]
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records))
    return path


@pytest.fixture(scope="session")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proteins") / "proteins.faa"
    generator = random.Random(0)
    lengths = range(30, 90, 7)
    sequences = ["".join(generator.choices("ACDEFGHIKLMNPQRSTVWY", k=length)) for length in lengths]
    path.write_text("".join(f">protein_{i}\n{sequence}\n" for i, sequence in enumerate(sequences)))
    return path


def write_class(path: Path, gc: float, count: int, seed: int) -> Path:
    """Records of one base composition, by which the test models can separate the classes."""
    draws = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            length = draws.choice([150, 300, 900])
            bases = "".join(draws.choices("ACGT", [1 - gc, gc, gc, 1 - gc], k=length))
            file.write(f">{path.stem}_{number}\n{bases}\n")
    return path


@contextmanager
def fast_runs() -> Iterator[None]:
    """Forks lanes from this process."""
    with pytest.MonkeyPatch.context() as patch:
        fork_lanes(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def _fast_runs() -> Iterator[None]:
    """Overridden where lanes are spawned."""
    with fast_runs():
        yield


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seventeen frames of `contigs` in five shards, with the same bounds for every model."""
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 4)


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: None, models: MadeModels, contigs: Path
) -> Path:
    """The folder of a predict run with five shards; tests change copies of it."""
    root = tmp_path_factory.mktemp("finished") / "run"
    with fast_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MAX_SHARD_ROWS", 4)
        assert main(["predict", str(contigs), "--out", str(root), *models.flags]) == 0
    return root


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What `--json` gave."""
        return json.loads(self.out)


class CommandLine:
    """Runs `virnuc` in this process and captures its output."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: object) -> Result:
        self._capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = self._capfd.readouterr()
        return Result(code, out, err)

    def done(self, *arguments: object) -> Result:
        """Requires exit code 0."""
        result = self(*arguments)
        assert result.code == 0, result.err
        return result

    def refused(self, code: int, message: str, *arguments: object) -> str:
        """Requires this exit code and an error with this message alone; returns stderr."""
        result = self(*arguments)
        assert (result.code, result.out) == (code, ""), result.err
        assert "virnuc: error: " in result.err
        assert "Traceback" not in result.err
        assert message in result.err
        return result.err


@pytest.fixture
def virnuc(capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capfd)


def rows(path: Path) -> Sequence[Sequence[str]]:
    """Lines of a TSV file."""
    return [line.split("\t") for line in path.read_text().splitlines()]


def wait_until(find: Callable[[], Value | None], seconds: float = 120.0) -> Value:
    """Polls until `find` returns a true value, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.02)
    return found


@contextmanager
def virnuc_process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`virnuc` in a process group of its own; after the block the group must end by itself."""

    def is_empty() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    # A shell disables Ctrl-C for what it starts in the background, tests among them, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "virnuc_cli", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
            process.wait(60)
            wait_until(is_empty, seconds=30)
        finally:
            if not is_empty():
                os.killpg(process.pid, signal.SIGKILL)
