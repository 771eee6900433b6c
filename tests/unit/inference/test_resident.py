"""Models that stay loaded: the same bits in every call, from any thread, after errors, interrupts and changed files."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.made_models import ESM2, MadeModels, MadeRun, make_esm2, plan_run
from virnuc_core import Embedder, Predictor, embed, predict
from virnuc_core.errors import MismatchError, StorageError, UsageError
from virnuc_core.inference import planning, resident, runner, worker
from virnuc_core.inference.events import LaneEvent, ShardDone
from virnuc_core.inference.lane_journal import JournalTail, LaneJournal
from virnuc_core.inference.resident import ResidentModels
from virnuc_core.models.checkpoint import Checkpoint, load_model
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import Family, ResolvedPrecision

MODEL = f"esm2:{ESM2}"
PROTEINS = ["MKVLAAGIVGLCAKAYAE", "mkv", "MSTNPKPQRKTKRNTNRRPQDVKFPGG", "MKV", "MXBZUO*-."]
OTHERS = ["MSTNPKPQRKTKRNTNRR" * 20, "MK", "LAGVSERT" * 9]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    threads, num_threads = set(threading.enumerate()), torch.get_num_threads()
    yield
    assert set(threading.enumerate()) <= threads
    assert torch.get_num_threads() == num_threads
    assert not resident._busy


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that are loaded."""
    names = []

    def load(
        checkpoint: Checkpoint, device: torch.device | str, precision: ResolvedPrecision, *_: object
    ) -> Encoder:
        names.append(checkpoint.name)
        return load_model(checkpoint, device, precision)

    monkeypatch.setattr(runner, "load_model", load)
    return names


def test_every_call_gives_the_bits_of_a_process_of_its_own(loads: list[str]) -> None:
    expected = embed(PROTEINS, MODEL, devices="cpu")
    loads.clear()
    with Embedder(MODEL, devices="cpu") as model:
        np.testing.assert_array_equal(model.embed(PROTEINS), expected)
        model.embed(OTHERS)
        np.testing.assert_array_equal(model.embed(PROTEINS), expected)
        assert model.embed([]).shape == (0, 96)
    assert len(loads) == 1


def test_a_predictor_writes_what_predict_writes(
    made_models: MadeModels, contigs: Path, tmp_path: Path, loads: list[str]
) -> None:
    names = {"esm_model": made_models.esm2, "dnabert_model": made_models.dnabert, "head": made_models.head}
    settings = {"chunk_length": 60, "devices": "cpu", **{name: str(path) for name, path in names.items()}}
    expected = predict(contigs, **settings)  # type: ignore[arg-type]
    loads.clear()
    with Predictor(**settings) as model:  # type: ignore[arg-type]
        model.predict([("a", "ATGGCC" * 30)])
        found = model.predict(contigs, out=tmp_path / "run")
        assert found.chunks.equals(expected.chunks)
        assert found.contigs.equals(expected.contigs)
        assert found.folder == tmp_path / "run"
        with pytest.raises(MismatchError, match="holds a run made with something else"):
            model.predict([("a", "ATGGCC" * 30)], out=tmp_path / "run")
    assert len(loads) == 2


def test_threads_share_a_model(loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    computing = 0
    run_shards = worker.run_shards

    def watch(*arguments: object) -> None:
        nonlocal computing
        computing += 1
        at_once.append(computing)
        run_shards(*arguments)  # type: ignore[arg-type]
        computing -= 1

    monkeypatch.setattr(worker, "run_shards", watch)
    parts = [[*PROTEINS[number:], *OTHERS[: number % 3]] for number in range(4)] * 3
    expected = [embed(part, MODEL, devices="cpu") for part in parts]
    loads.clear()
    with (
        Embedder(MODEL, devices="cpu") as model,
        Embedder(MODEL, devices="cpu") as another,
        ThreadPoolExecutor(6) as threads,
    ):
        found = [
            threads.submit((model, another)[number % 2].embed, part) for number, part in enumerate(parts)
        ]
        for vectors, future in zip(expected, found, strict=True):
            np.testing.assert_array_equal(future.result(), vectors)
    assert len(loads) == 2
    assert set(at_once) == {1}  # the CPU is one device, whoever uses it


@pytest.mark.parametrize("devices", [("cpu",), ("cpu:0", "cpu:1")])
def test_only_what_is_missing_is_computed_on_all_devices(
    tmp_path: Path, contigs: Path, made_models: MadeModels, finished_run: MadeRun, devices: tuple[str, ...]
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config())
    run.compute([1])
    made_at = run.folder.shard(1).stat().st_mtime_ns
    models = ResidentModels(devices)
    reports = models.compute(run.folder)
    assert [report.device for report in reports] == list(devices)
    assert run.folder.shard(1).stat().st_mtime_ns == made_at
    indices = [shard.index for shard in run.plan.shards]
    assert sorted(done.shard for report in reports for done in report.shards) == [0, *indices[2:]]
    journals = [JournalTail(path).read_new() for path in run.folder.lanes.iterdir()]
    assert sum(map(len, journals)) == len(indices) - 1 + 3 * len(reports)
    for index in indices:
        assert run.folder.shard(index).read_bytes() == finished_run.folder.shard(index).read_bytes()
    assert models.compute(run.folder) == []
    models.close()


def test_closing_waits_for_calls_and_ends_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Embedder(MODEL, devices="cpu")
    expected = model.embed(PROTEINS)
    begun, run_shards = threading.Event(), worker.run_shards

    def run_slowly(*arguments: object) -> None:
        begun.set()
        time.sleep(0.3)
        run_shards(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "run_shards", run_slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(model.embed, PROTEINS)
        assert begun.wait(10)
        second = threads.submit(model.embed, PROTEINS)
        time.sleep(0.1)
        model.close()
        np.testing.assert_array_equal(first.result(), expected)
        with pytest.raises(UsageError, match="are closed"):
            second.result()
    model.close()
    with pytest.raises(UsageError, match="are closed"):
        model.embed(PROTEINS)


def test_a_model_whose_file_has_changed_is_loaded_anew(tmp_path: Path, loads: list[str]) -> None:
    path = make_esm2(tmp_path / "esm2")
    with Embedder(str(path), devices="cpu") as model:
        first = model.embed(PROTEINS)
        shutil.rmtree(path)
        make_esm2(path, seed=7)
        second = model.embed(PROTEINS)
        assert len(loads) == 2
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(second, embed(PROTEINS, str(path), devices="cpu"))


def test_after_an_error_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    with Embedder(MODEL, devices="cpu") as model:
        expected = model.embed(PROTEINS)
        with monkeypatch.context() as patch:
            patch.setattr(worker, "write_shard", fail)
            with pytest.raises(StorageError, match="No space left"):
                model.embed(PROTEINS)
        np.testing.assert_array_equal(model.embed(PROTEINS), expected)


def test_an_interrupt_ends_the_call_and_leaves_the_model(
    loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = LaneJournal.write, 0

    def interrupt(journal: LaneJournal, event: LaneEvent) -> None:
        nonlocal written
        write(journal, event)
        if isinstance(event, ShardDone):
            written += 1
            signal.pthread_kill(threading.main_thread().ident or os.getpid(), signal.SIGINT)

    proteins: Sequence[str] = ["MSTNPKPQRKTKRNTNRR" * number for number in range(1, 25)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Embedder(MODEL, devices="cpu", shard_seconds=1e-3) as model:
            with monkeypatch.context() as patch:
                patch.setattr(LaneJournal, "write", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    model.embed(proteins)
            assert 0 < written < 24
            vectors = model.embed(proteins)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(loads) == 1
    np.testing.assert_array_equal(vectors, embed(proteins, MODEL, devices="cpu", shard_seconds=1e-3))


def test_memory_that_its_own_models_take_changes_no_plan(
    tmp_path: Path, contigs: Path, made_models: MadeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = iter([3000, 2000, 1000, 500])
    monkeypatch.setattr(planning, "default_token_budget", lambda *_: next(budgets))
    models, config = ResidentModels(("cpu",)), made_models.config()
    plans = []
    for number in range(2):
        run = plan_run(tmp_path / f"run{number}", contigs, made_models.config(token_budget=63))
        run.folder.plan.unlink()
        plans.append(models.plan(run.folder, config, "predict"))
    assert plans[0] == plans[1]
    assert [model.token_budget for model in plans[0].models] == [3000, 2000]


def test_a_model_of_the_hub_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for = []

    def open_once(name: str, family: Family) -> Checkpoint:
        looked_for.append(name)
        return open_checkpoint(str(ESM2) if name == "owner/name" else name, family)

    monkeypatch.setattr(planning, "open_checkpoint", open_once)
    with Embedder("esm2:owner/name", devices="cpu") as model:
        for _ in range(2):
            model.embed(PROTEINS)
    assert looked_for == ["owner/name", str(ESM2)]


_FORKED = """
import os, sys
from virnuc_core import Embedder
from virnuc_core.errors import UsageError
model = Embedder(sys.argv[1], devices="cpu")
if os.fork() == 0:
    try:
        model.embed(["MKV"])
    except UsageError as error:
        print(error, flush=True)
    model.close()
    os._exit(0)
os.wait()
print(model.embed(["MKV"]).shape[0])
"""


def test_models_of_another_process_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED, MODEL], capture_output=True, text=True, check=True)
    refused, own = done.stdout.splitlines()
    assert "make them where they are used" in refused
    assert own == "1", "and stay usable where they were made"
