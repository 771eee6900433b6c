"""Lanes: several in parallel, a killed one, and one that fails for good."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from prefect import flow

from flows import lanes
from flows.lanes import LocalLanes
from tasks.stages import compute_shards, find_pending, plan
from tests.end_to_end.conftest import Checkpoints
from virnuc_core.errors import CheckpointError, LaneError, MismatchError
from virnuc_core.inference import sharding
from virnuc_core.inference.events import LaneReport, LaneStarted
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.inference.launcher import assign_shards
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.inference.shard import pending_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.settings import RunConfig

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def config(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    # Seventeen frames in a few shards.
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 4)
    return RunConfig(
        esm_model=str(checkpoints.esm), dnabert_model=str(checkpoints.dnabert), head=str(checkpoints.head)
    )


def planned_run(root: Path, contigs: Path, config: RunConfig) -> RunFolder:
    root.mkdir()
    folder = RunFolder(root)
    index_inputs(folder, [str(contigs)], config.chunk_length, "dna")
    plan.fn(folder, config, "predict", ("cpu",))
    return folder


@flow
def computed(root: str, devices: tuple[str, ...]) -> list[LaneReport]:
    return LocalLanes(devices).compute(RunFolder(Path(root)))


def starts_of(folder: RunFolder) -> list[LaneStarted]:
    """Started lane processes, by journal."""
    entries = [entry for path in sorted(folder.lanes.iterdir()) for entry in JournalTail(path).read_new()]
    return [entry.event for entry in entries if isinstance(entry.event, LaneStarted)]


def shard_bytes(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.shards.iterdir())}


def test_number_of_lanes_does_not_change_a_byte(contigs: Path, config: RunConfig, tmp_path: Path) -> None:
    one = planned_run(tmp_path / "one", contigs, config)
    two = planned_run(tmp_path / "two", contigs, config)
    assert len(computed(str(one.root), ("cpu",))) == 1
    reports = computed(str(two.root), ("cpu", "cpu"))
    assert [report.lane for report in reports] == [0, 1]
    assert all(report.shards for report in reports)
    assert shard_bytes(one) == shard_bytes(two)
    assert len(shard_bytes(one)) >= 5


def test_killed_lane_is_tried_again_and_keeps_its_finished_shards(
    contigs: Path, config: RunConfig, tmp_path: Path
) -> None:
    folder = planned_run(tmp_path / "run", contigs, config)
    killer = threading.Thread(target=kill_lane_after_first_shard, args=(folder,))
    killer.start()
    [report] = computed(str(folder.root), ("cpu",))
    killer.join()
    [first, again] = starts_of(folder)
    num_shards = len(shard_bytes(folder))
    assert len(first.shards) == num_shards
    assert 0 < len(again.shards) < num_shards
    # A shard that was written but not yet in the journal when the process was killed is in no report.
    assert {*again.shards} <= {shard.shard for shard in report.shards} <= {*first.shards}


def test_lane_that_always_dies_does_not_stop_the_others(
    contigs: Path,
    config: RunConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_delay = compute_shards.with_options(retry_delay_seconds=0)
    monkeypatch.setattr(lanes, "compute_shards", without_delay)
    folder = planned_run(tmp_path / "run", contigs, config)
    kept, lost = assign_shards(read_plan(folder.plan), find_pending.fn(folder), 2)
    over = threading.Event()
    killer = threading.Thread(target=kill_whenever_seen, args=("virnuc-lane-1", over))
    killer.start()
    try:
        with pytest.raises(LaneError, match=rf"lane 1 on cpu was ended by SIGKILL .* with {len(lost)} of"):
            computed(str(folder.root), ("cpu", "cpu"))
    finally:
        over.set()
        killer.join()
    assert pending_shards(folder, read_plan(folder.plan)) == lost
    assert f"1 of 2 lanes failed, and {len(lost)} of {len(kept + lost)} shards are missing" in caplog.text
    [lane] = computed(str(folder.root), ("cpu",))
    assert tuple(done.shard for done in lane.shards) == lost


def kill_whenever_seen(name: str, over: threading.Event) -> None:
    while not over.wait(0.01):
        for process in multiprocessing.active_children():
            if process.name == name and process.pid:
                os.kill(process.pid, signal.SIGKILL)


def kill_lane_after_first_shard(folder: RunFolder) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if folder.shard(0).exists():
            for process in multiprocessing.active_children():
                if process.name.startswith("virnuc-lane") and process.pid:
                    os.kill(process.pid, signal.SIGKILL)
                    return
        time.sleep(0.001)


def test_error_that_no_retry_can_mend_is_the_lanes_own(
    contigs: Path, config: RunConfig, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = planned_run(tmp_path / "run", contigs, config)
    text = folder.plan.read_text()
    folder.plan.write_text(text.replace(str(checkpoints.head), str(checkpoints.other_head)))
    with pytest.raises((CheckpointError, MismatchError), match="head"):
        computed(str(folder.root), ("cpu",))
    assert len(starts_of(folder)) == 1
