"""Plans, frame stores and journals whose JSON is of another form are damaged, or passed over; nothing else happens."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.binary_edits import hostile_json
from tests.made_plans import PLAN
from virnuc_core.errors import DamagedFileError
from virnuc_core.inference.events import LaneFinished, LaneStarted
from virnuc_core.inference.lane_journal import JournalTail, LaneJournal
from virnuc_core.inference.plan import Shard, read_plan, write_plan
from virnuc_core.sequences.frame_store import FrameStore

SHARDS: dict[str, tuple[Shard, ...]] = {
    "gap": (Shard(index=0, begin=0, end=3, cost=1.0), Shard(index=1, begin=4, end=9, cost=1.0)),
    "overlap": (Shard(index=0, begin=0, end=5, cost=1.0), Shard(index=1, begin=4, end=9, cost=1.0)),
    "backwards": (Shard(index=0, begin=0, end=5, cost=1.0), Shard(index=1, begin=5, end=4, cost=1.0)),
    "other numbers": (Shard(index=1, begin=0, end=9, cost=1.0),),
    "late": (Shard(index=0, begin=1, end=9, cost=1.0),),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_that_do_not_follow_one_another(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, replace(PLAN, shards=SHARDS[name]))
    with pytest.raises(DamagedFileError, match="do not follow one another"):
        read_plan(path)


@pytest.mark.parametrize("name", hostile_json("shards"))
def test_plans_of_another_form(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(hostile_json("shards")[name])
    with pytest.raises(DamagedFileError, match=r"plan .*plan\.json"):
        read_plan(path)


@pytest.mark.parametrize("name", hostile_json("inputs"))
def test_stores_of_another_form(name: str, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_bytes(hostile_json("inputs")[name])
    with pytest.raises(DamagedFileError, match="is not a whole frame store"):
        FrameStore.open(tmp_path)


def test_a_journal_is_read_around_lines_that_make_no_sense(tmp_path: Path) -> None:
    path = tmp_path / "lane.jsonl"
    started = LaneStarted(lane=0, device="cpu", host="here", pid=1, shards=(0, 1))
    odd: list[dict[str, Any]] = [
        {"time": 10**400, "event": "LaneFinished", "lane": 0, "seconds": 1.0},
        {"time": 1.0, "event": "LaneFinished", "lane": "0", "seconds": 1.0},
        {"time": 1.0, "event": "LaneFinished", "lane": 0, "seconds": float("nan")},
        {"time": 1.0, "event": ["LaneFinished"], "lane": 0, "seconds": 1.0},
        {"time": 1.0, "event": "LaneStarted", **asdict(started), "shards": ["0"]},
        {"time": 1.0, "event": "ShardDone", "lane": 0, "shard": 0, "counters": [], "seconds": {}},
    ]
    with LaneJournal(path) as journal:
        journal.write(started)
    with path.open("ab") as file:
        for content in (*hostile_json("time").values(), *(json.dumps(line).encode() for line in odd)):
            file.write(content.replace(b"\n", b" ") + b"\n")
    with LaneJournal(path) as journal:
        journal.write(LaneFinished(lane=0, seconds=2.0))
    assert [entry.event for entry in JournalTail(path).read_new()] == [
        started,
        LaneFinished(lane=0, seconds=2.0),
    ]
