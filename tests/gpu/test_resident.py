"""Models that stay loaded on GPUs, in this process: the bits of a lane's process, whatever surrounds a call."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.forward import random_sequences
from tests.made_models import record_loads
from virnuc_core import Embedder, embed
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import EngineSettings, embed_config
from virnuc_core.specs import Family

pytestmark = pytest.mark.gpu

MODELS: dict[Family, str] = {"esm2": "esm2:random:8M", "dnabert_s": "dnabert:random:DNABERT-S"}


def made_sequences(family: Family, count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return random_sequences(family, random.integers(30, 500, count), random).to_strings()


def embedded_by_a_lane(folder: Path, family: Family, sequences: list[str], **settings: object) -> np.ndarray:
    """Vectors from a process of its own."""
    run, fasta = RunFolder(folder), folder / "in.fa"
    fasta.write_text("".join(f">{number}\n{text}\n" for number, text in enumerate(sequences)))
    store = build_frame_store([fasta], run.frames, None, "protein" if family == "esm2" else "dna")
    config = embed_config(family, MODELS[family].partition(":")[2], EngineSettings(**settings))
    plan = open_plan(config, store, "embed", ("cuda:0",), run)
    LocalLanes(("cuda:0",), in_processes=True).compute(run)
    results = [result for _, result in iter_shard_results(run, plan)]
    return np.concatenate([result.protein if family == "esm2" else result.dna for result in results])


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_loads(monkeypatch)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("family", MODELS)
def test_every_call_gives_the_bits_of_a_lane(
    family: Family, precision: str, tmp_path: Path, loads: list[str]
) -> None:
    sequences = made_sequences(family, 3000, seed=1)
    expected = embedded_by_a_lane(tmp_path, family, sequences, precision=precision)
    with Embedder(MODELS[family], devices="0", precision=precision) as model:
        np.testing.assert_array_equal(model.embed(sequences), expected)
        model.embed(made_sequences(family, 500, seed=2))
        np.testing.assert_array_equal(model.embed(sequences), expected)
    assert len(loads) == 1
    np.testing.assert_array_equal(
        embed(sequences, MODELS[family], devices="0", precision=precision), expected
    )


def test_a_call_takes_nothing_of_its_surroundings() -> None:
    sequences = made_sequences("esm2", 1000, seed=3)
    with Embedder(MODELS["esm2"], devices="0") as model:
        expected = model.embed(sequences)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16), torch.device("cuda"):
            np.testing.assert_array_equal(model.embed(sequences), expected)
            assert torch.cuda.current_stream() == stream


def test_shards_of_one_call_are_spread_over_all_devices() -> None:
    sequences = made_sequences("esm2", 4000, seed=4)
    settings = {"precision": "fp16", "token_budget": 16384, "shard_seconds": 0.01}
    expected = embed(sequences, MODELS["esm2"], devices="0", **settings)
    np.testing.assert_array_equal(embed(sequences, MODELS["esm2"], **settings), expected)


def test_closing_gives_the_memory_back() -> None:
    sequences = made_sequences("esm2", 200, seed=5)
    embed(sequences, MODELS["esm2"], devices="0")  # leaves tables of the kernels
    before = torch.cuda.memory_reserved()
    model = Embedder("esm2:random:150M", devices="0")
    model.embed(sequences)
    assert torch.cuda.memory_reserved() > before + 2 * 10**8
    model.close()
    assert torch.cuda.memory_reserved() < before + 10**8


LOST = """
import torch
from virnuc_core import Embedder
from virnuc_core.errors import DeviceLostError

model = Embedder("esm2:random:8M", devices="0")
expected = model.embed(["MKV"])
torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]  # an assertion fails on the device
print((model.embed(["MKV"]) == expected).all())
try:
    model.embed(["MKV"])
except DeviceLostError as error:
    print(error)
model.close()
print("closed")
"""


def test_after_a_gpu_failed_the_call_goes_on_in_a_process_and_the_next_is_refused() -> None:
    command = [sys.executable, "-u", "-X", "faulthandler", "-c", LOST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, (done.returncode, done.stdout, done.stderr)
    is_same, refusal, closed = lines
    assert (is_same, closed) == ("True", "closed")
    assert "can no longer use any" in refusal
