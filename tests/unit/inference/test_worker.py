"""One lane's work in this process: its events, its files, its warning."""

import logging
from pathlib import Path

import pytest

from tests.made_models import MadeModels, plan_run
from virnuc_core.errors import DamagedFileError
from virnuc_core.inference.events import LaneEvent, ModelsLoaded, ShardDone, StageSeconds
from virnuc_core.inference.worker import run_shards
from virnuc_core.run_plan import RunFolder


def test_events_follow_the_files(tmp_path: Path, contigs: Path, made_models: MadeModels) -> None:
    run = plan_run(tmp_path, contigs, made_models.config())
    events: list[LaneEvent] = []

    def tell(event: LaneEvent) -> None:
        if isinstance(event, ShardDone):
            assert run.folder.shard(event.shard).exists()
        events.append(event)

    run_shards(run.folder, (2, 0), "cpu", 3, tell)
    loaded, *done = events
    assert isinstance(loaded, ModelsLoaded)
    assert loaded.seconds > 0
    assert [event.shard for event in done if isinstance(event, ShardDone)] == [2, 0]
    assert {event.lane for event in events} == {3}
    assert sorted(path.name for path in run.folder.shards.iterdir()) == ["shard_00000.h5", "shard_00002.h5"]


def test_stages_add_up() -> None:
    stages = [StageSeconds(tokenize=1, forward=2), StageSeconds(forward=3, write=4)]
    assert sum(stages, StageSeconds()) == StageSeconds(tokenize=1, forward=5, write=4)


def test_poor_packing_is_warned_of(
    tmp_path: Path, contigs: Path, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(token_budget=63))
    with caplog.at_level(logging.WARNING):
        run_shards(run.folder, (0,), "cpu", 0, lambda event: None)
    assert "dnabert (dnabert_s): packing efficiency is" in caplog.text


def test_without_a_plan_there_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match=r"plan\.json"):
        run_shards(RunFolder(tmp_path), (0,), "cpu", 0, lambda event: None)
