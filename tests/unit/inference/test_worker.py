"""One lane's work in this process: events, files and warnings."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.batching.tokenizers import Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError, DeviceError, MismatchError
from virnuc_core.inference.device import Streams
from virnuc_core.inference.events import LaneEvent, ModelsLoaded, ShardDone
from virnuc_core.inference.plan import RunPlan, read_plan, write_plan
from virnuc_core.inference.runner import InferenceRunner
from virnuc_core.inference.shard import pending_shards
from virnuc_core.inference.worker import run_shards
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.specs import Family


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.fixture
def run(tmp_path: Path, contigs: Path, made_models: MadeModels) -> MadeRun:
    """A run of at least four shards, none computed."""
    run = plan_run(tmp_path / "run", contigs, made_models.config(), shard_seconds=0.04)
    assert len(run.plan.shards) >= 4
    return run


def shard_names(run: MadeRun) -> list[str]:
    return sorted(path.name for path in run.folder.shards.iterdir() if path.is_file())


def test_events_follow_the_files_and_poor_packing_is_warned_of(
    tmp_path: Path, contigs: Path, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(token_budget=63))
    events: list[LaneEvent] = []

    def emit(event: LaneEvent) -> None:
        if isinstance(event, ShardDone):
            assert run.folder.shard(event.shard).exists()
        events.append(event)

    with caplog.at_level(logging.WARNING):
        run_shards(run.folder, (2, 0), "cpu", 3, emit)
    loaded, *done = events
    assert isinstance(loaded, ModelsLoaded)
    assert loaded.seconds > 0
    assert [event.shard for event in done if isinstance(event, ShardDone)] == [2, 0]
    assert {event.lane for event in events} == {3}
    assert shard_names(run) == ["shard_00000.h5", "shard_00002.h5"]
    assert "dnabert (dnabert_s): packing efficiency is" in caplog.text


def test_a_shard_that_cannot_be_written_is_an_error_of_the_lane(run: MadeRun) -> None:
    run.folder.shards.mkdir()
    run.folder.shard(1).mkdir()
    with pytest.raises(OSError, match="shard_00001"):
        run.compute()
    assert shard_names(run)[0] == "shard_00000.h5"
    assert "shard_00001.h5" not in shard_names(run)


def test_an_error_in_the_thread_ahead_is_an_error_of_the_lane(
    run: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Esm2Tokenizer.encode
    left = 2

    def encode_twice(self: Esm2Tokenizer, proteins: ByteColumn) -> TokenColumn:
        nonlocal left
        if not left:
            raise MemoryError("tokenizer")
        left -= 1
        return encode(self, proteins)

    monkeypatch.setattr(Esm2Tokenizer, "encode", encode_twice)
    with pytest.raises(MemoryError, match="tokenizer"):
        run.compute()
    assert shard_names(run) == ["shard_00000.h5", "shard_00001.h5"]


def test_models_that_cannot_be_loaded_are_an_error_of_the_lane(
    run: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    encode = Esm2Tokenizer.encode

    def encode_and_tell(self: Esm2Tokenizer, proteins: ByteColumn) -> TokenColumn:
        begun.set()
        return encode(self, proteins)

    def fail(plan: RunPlan, streams: Streams, reused_families: frozenset[Family]) -> InferenceRunner:
        assert begun.wait(10), "nothing is prepared while models load"
        raise CheckpointError("broken")

    monkeypatch.setattr(Esm2Tokenizer, "encode", encode_and_tell)
    monkeypatch.setattr(InferenceRunner, "load", fail)
    events: list[LaneEvent] = []
    with pytest.raises(CheckpointError, match="broken"):
        run_shards(run.folder, range(len(run.plan.shards)), "cpu", 0, events.append)
    assert events == []
    assert shard_names(run) == []


def test_an_interrupt_ends_all_threads(run: MadeRun) -> None:
    def interrupt(event: LaneEvent) -> None:
        if isinstance(event, ShardDone):
            signal.pthread_kill(threading.main_thread().ident or os.getpid(), signal.SIGINT)

    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_shards(run.folder, range(len(run.plan.shards)), "cpu", 0, interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "shard_00000.h5" in shard_names(run)
    run.compute()
    assert len(shard_names(run)) == len(run.plan.shards)


@pytest.mark.parametrize("settings", [{"repr_layer": 1}, {}], ids=["other settings", "the same settings"])
def test_a_lane_writes_nothing_into_the_folder_of_another_run(
    run: MadeRun, contigs: Path, made_models: MadeModels, settings: dict[str, int]
) -> None:
    """The run is started over while an old lane of a pool, which nobody has stopped, is running."""

    def start_over(event: LaneEvent) -> None:
        if isinstance(event, ShardDone) and event.shard == 0:
            with open_run_folder(run.folder.root, force=True):
                plan_run(run.folder.root, contigs, made_models.config(**settings), shard_seconds=0.04)
            run.folder.shards.mkdir()

    indices = range(len(run.plan.shards))
    if settings:
        with pytest.raises(MismatchError, match=r"was started over \(--force\) .* shard 1 is not written"):
            run_shards(run.folder, indices, "cpu", 0, start_over)
        assert list(run.folder.shards.iterdir()) == []
    else:
        run_shards(run.folder, indices, "cpu", 0, start_over)
        assert pending_shards(run.folder, read_plan(run.folder.plan)) == (0,)


def test_attention_that_cannot_run_here_is_an_error_of_its_own(run: MadeRun) -> None:
    """The plan may come from a machine with other packages or GPUs."""
    models = tuple(replace(model, attention="triton", precision="bf16") for model in run.plan.models)
    write_plan(run.folder.plan, replace(run.plan, models=models))
    with pytest.raises(DeviceError, match="--attention triton needs a CUDA device"):
        run.compute()
