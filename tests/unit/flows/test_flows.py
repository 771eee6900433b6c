"""Names of flow runs, checks of their paths, and how a pool divides and repeats work."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.runtime import flow_run
from prefect.states import Failed

from flows import pool
from flows.computed_run import labelled_name, run_name
from flows.lanes import lane_journal_name, lane_name, plan_journal_name, plan_name
from flows.outputs import require_absolute, require_run
from flows.pool import lanes_for
from flows.reprocess import reprocess_name
from virnuc_core.errors import InputError, UsageError
from virnuc_core.inference.events import LaneFailed
from virnuc_core.settings import PredictSettings
from virnuc_core.training.labels import LabelledFiles

LANE = {"lane": 3, "shards": (1, 2)}
FILES = {"viral": ("contigs.fa",), "other": ("absent.fa",)}


@pytest.mark.parametrize(
    ("make_name", "flow", "parameters", "expected"),
    [
        (
            run_name,
            "predict",
            {"inputs": ["contigs.fa", "absent.fa"], "settings": PredictSettings()},
            "predict contigs.fa and 1 more tiny 1.26 MB",
        ),
        (
            run_name,
            "embed",
            {"inputs": ["contigs.fa"], "model": "esm2:8M", "settings": None},
            "embed contigs.fa esm2:8M 1.26 MB",
        ),
        (lane_name, "embed-lane", {**LANE, "device": "cuda:1"}, "lane-3-cuda:1"),
        (lane_name, "embed-lane", {**LANE, "device": "cpu", "token": "0123"}, "lane-3 2 shards"),
        (plan_name, "plan-run", {"folder": "/data/results"}, "plan results"),
        (reprocess_name, "reprocess", {"run": "/data/results"}, "reprocess results"),
        (labelled_name, "train", {"files": FILES}, "train contigs.fa and 1 more 1.26 MB"),
        (
            labelled_name,
            "train",
            {"files": LabelledFiles(**FILES)},
            "train contigs.fa and 1 more 1.26 MB",
        ),
    ],
)
def test_names_of_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_name: Callable[[], str],
    flow: str,
    parameters: dict[str, object],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("contigs.fa").write_bytes(b"A" * 1_260_000)
    monkeypatch.setitem(flow_run.FIELDS, "parameters", lambda: parameters)
    monkeypatch.setitem(flow_run.FIELDS, "flow_name", lambda: flow)
    assert make_name() == expected


def test_names_of_journals() -> None:
    assert lane_journal_name(3, "0123abcd-4567") == "lane-0003-0123abcd"
    assert plan_journal_name("0123abcd-4567") == "plan-0123abcd"


def test_a_deployed_run_needs_absolute_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    require_absolute("a.fa", "/data/b.fa", "out")
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "of-a-deployment")
    require_absolute("/data/b.fa", "/out")
    with pytest.raises(UsageError, match=r"^a\.fa, out: a deployed run has no folder of its own"):
        require_absolute("a.fa", "/data/b.fa", "out")


def test_a_run_has_a_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder of a run"):
        require_run(tmp_path)
    (tmp_path / "plan.json").touch()
    require_run(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "num_workers", "expected"),
    [
        (0.0, 8, 1),
        (30.0, 8, 1),  # half a minute is one lane, however many workers there are
        (600.0, 8, 8),
        (601.0, 0, 2),  # nobody is online yet
        (6000.0, 8, 16),
        (6001.0, 4, 12),
        (180.0, 8, 3),  # of a minute each, and not eight of twenty seconds
    ],
)
def test_lanes_are_a_multiple_of_the_workers(seconds: float, num_workers: int, expected: int) -> None:
    assert lanes_for(seconds, 600.0, num_workers) == expected


@given(st.floats(0, 1e9), st.floats(1, 1e4), st.integers(0, 1000))
def test_no_lane_is_longer_than_asked_for_or_much_shorter(
    seconds: float, lane_seconds: float, num_workers: int
) -> None:
    num_lanes = lanes_for(seconds, lane_seconds, num_workers)
    assert num_lanes >= 1
    assert seconds / num_lanes <= lane_seconds * (1 + 1e-9)
    assert num_lanes == 1 or seconds / num_lanes >= lane_seconds / 10 * (1 - 1e-9)
    assert num_lanes < max(1, math.ceil(seconds / lane_seconds)) + max(1, num_workers)


def test_only_a_failure_that_may_go_away_is_asked_for_again() -> None:
    transient = LaneFailed(lane=0, error="LaneError", message="it died", retryable=True)
    permanent = LaneFailed(lane=0, error="InputError", message="no such file", retryable=False)
    delay = pool._retry_delay_or_raise("lane 0", transient, Failed(), failures=0)
    assert delay == pool.RETRY_DELAYS_SECONDS[0]
    with pytest.raises(InputError, match="no such file"):
        pool._retry_delay_or_raise("lane 0", permanent, Failed(), failures=0)
