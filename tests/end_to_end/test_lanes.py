"""Lanes: several in parallel, a killed one, and one that fails for good."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect import flow

from flows.lanes import embed_lane
from tasks import local_lanes
from tasks.local_lanes import LocalLanes
from tasks.stages import compute_shards, find_pending, plan
from tests.forked_lanes import KilledContext
from tests.made_models import MadeModels
from virnuc_core.errors import CheckpointError, LaneError, MismatchError
from virnuc_core.inference.events import LaneReport, LaneStarted
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.inference.launcher import assign_shards
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.inference.shard import pending_shards
from virnuc_core.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("prefect_server", "small_shards")

MakeRun = Callable[[], RunFolder]


@pytest.fixture
def planned(models: MadeModels, contigs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Plans runs of five shards, whose lanes are tried again without a delay."""
    monkeypatch.setattr(
        local_lanes, "compute_shards", compute_shards.task.with_options(retry_delay_seconds=0)
    )
    config = models.config(chunk_length=500)

    def make() -> RunFolder:
        folder = RunFolder(tmp_path / f"run_{len(list(tmp_path.iterdir()))}")
        folder.root.mkdir()
        index_inputs(folder, [str(contigs)], config.chunk_length, "dna")
        plan.fn(folder, config, "predict", ("cpu",))
        return folder

    return make


@flow
def computed(root: str, devices: tuple[str, ...]) -> list[LaneReport]:
    return LocalLanes(devices, embed_lane).compute(RunFolder(Path(root)))


def starts_of(folder: RunFolder) -> list[LaneStarted]:
    """Started lane processes, by journal."""
    entries = [entry for path in sorted(folder.lanes.iterdir()) for entry in JournalTail(path).read_new()]
    return [entry.event for entry in entries if isinstance(entry.event, LaneStarted)]


def shard_bytes(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.shards.glob("shard_*.h5"))}


def test_neither_more_lanes_nor_a_killed_one_change_a_byte(
    planned: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, killed = planned(), planned(), planned()
    assert len(computed(str(one.root), ("cpu",))) == 1
    reports = computed(str(two.root), ("cpu", "cpu"))
    assert [report.lane for report in reports] == [0, 1]
    assert all(report.shards for report in reports)
    assert shard_bytes(two) == shard_bytes(one)
    for report in reports:  # each has the lines of its own lane alone
        lines = [line for line in two.lane_log(report.journal).read_text().splitlines() if ": lane " in line]
        assert len(lines) == len(report.shards)
        assert all(f": lane {report.lane}: shard " in line for line in lines)
    assert len(shard_bytes(one)) == 5

    context = KilledContext(lane=0, num_shards=1, times=1)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    [report] = computed(str(killed.root), ("cpu",))
    assert [start.shards for start in starts_of(killed)] == [(0, 1, 2, 3, 4), (1, 2, 3, 4)]
    # A shard that was written but not yet in the journal when the process was killed is in no report.
    assert {1, 2, 3, 4} <= {shard.shard for shard in report.shards}
    assert shard_bytes(killed) == shard_bytes(one)


def test_lane_that_always_dies_does_not_stop_the_others(
    planned: MakeRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = planned()
    kept, lost = assign_shards(read_plan(folder.plan), find_pending.fn(folder), 2)
    with monkeypatch.context() as patch:
        context = KilledContext(lane=1, num_shards=0, times=99)
        patch.setattr(multiprocessing, "get_context", lambda method: context)
        with pytest.raises(LaneError, match=rf"lane 1 on cpu was ended by SIGKILL .* with {len(lost)} of"):
            computed(str(folder.root), ("cpu", "cpu"))
    assert pending_shards(folder, read_plan(folder.plan)) == lost
    kept_log, lost_log = sorted(folder.lanes.glob("*.log"))
    assert "was ended by SIGKILL" in lost_log.read_text()
    assert "SIGKILL" not in kept_log.read_text()
    assert f"1 of 2 lanes failed, and {len(lost)} of {len(kept + lost)} shards are missing" in caplog.text
    [lane] = computed(str(folder.root), ("cpu",))
    assert tuple(done.shard for done in lane.shards) == lost


def test_an_error_that_no_retry_can_mend_is_that_of_the_lane(
    planned: MakeRun, models: MadeModels, other_head: Path
) -> None:
    folder = planned()
    folder.plan.write_text(folder.plan.read_text().replace(str(models.head), str(other_head)))
    with pytest.raises((CheckpointError, MismatchError), match="head"):
        computed(str(folder.root), ("cpu",))
    assert len(starts_of(folder)) == 1
