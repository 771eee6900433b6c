"""Whole runs in separate processes: identical shards for any number of GPUs, and after resuming."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.forward import random_sequences, write_fasta
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.plan import RunPlan, read_plan, write_plan
from virnuc_core.inference.planning import make_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig

pytestmark = pytest.mark.gpu

NUM_SEQUENCES = 6000
MODELS = {"protein": {"esm_model": "random:8M", "dnabert_model": None},
          "dna": {"esm_model": None, "dnabert_model": "random:DNABERT-S"}}  # fmt: skip


def make_run(folder: Path, kind: str, **settings: object) -> RunFolder:
    """A planned run over random sequences of mixed length, in about eight shards."""
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    alphabet, family = ("protein", "esm2") if kind == "protein" else ("dna", "dnabert_s")
    lengths = np.random.default_rng(0).integers(30, 500, NUM_SEQUENCES)
    fasta = folder / "in.fa"
    write_fasta(fasta, random_sequences(family, lengths, np.random.default_rng(1)))
    build_frame_store([str(fasta)], run.frames, None, alphabet)
    config = RunConfig(chunk_length=None, **MODELS[kind], **settings)
    store = FrameStore.open(run.frames)
    whole = sum(shard.cost for shard in make_plan(config, store, "embed", ("cuda:0",)).shards)
    sized = RunConfig(chunk_length=None, shard_seconds=whole / 8, **MODELS[kind], **settings)
    write_plan(run.plan, make_plan(sized, store, "embed", ("cuda:0",)))
    return run


def compute(run: RunFolder, devices: Sequence[str]) -> RunPlan:
    LocalLanes(tuple(devices), in_processes=True).compute(run)
    return read_plan(run.plan)


def digests(run: RunFolder, plan: RunPlan) -> list[str]:
    return [hashlib.sha256(run.shard(i).read_bytes()).hexdigest() for i in range(len(plan.shards))]


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_bytes_after_a_resume_and_on_several_gpus(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", kind)
    plan = compute(run, ["cuda:0"])
    assert len(plan.shards) >= 6
    expected = digests(run, plan)
    lost = range(0, len(plan.shards), 2)
    for index in lost:
        run.shard(index).unlink()
    compute(run, ["cuda:0"])
    assert digests(run, plan) == expected
    for index in range(len(plan.shards)):
        run.shard(index).unlink()
    compute(run, [f"cuda:{i}" for i in range(torch.cuda.device_count())])
    assert digests(run, plan) == expected
