"""The missing shards of a run, computed here."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from tests.made_models import MadeModels, MadeRun, plan_run
from virnuc_core.errors import UsageError
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.inference.launcher import _LANE_PROCESS, compute_missing, require_main_process


def test_only_what_is_missing_is_computed(made_models: MadeModels, contigs: Path, tmp_path: Path) -> None:
    run = plan_run(tmp_path, contigs, made_models.config())
    run.compute([1])
    threads = torch.get_num_threads()
    [report] = compute_missing(run.folder, run.plan, ("cpu",))
    assert torch.get_num_threads() == threads
    wanted = [shard.index for shard in run.plan.shards if shard.index != 1]
    assert sorted(done.shard for done in report.shards) == wanted
    assert report.load_seconds > 0
    [journal] = run.folder.lanes.iterdir()
    assert len(JournalTail(journal).read_new()) == len(wanted) + 3
    assert compute_missing(run.folder, run.plan, ("cpu",)) == []


def test_processes_give_the_same_bytes(
    finished_run: MadeRun, made_models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    run = plan_run(tmp_path, contigs, made_models.config())
    # Two names of the one device there is everywhere.
    assert len(compute_missing(run.folder, run.plan, ("cpu", "cpu"))) == 2
    for shard in run.plan.shards:
        ours, theirs = (
            folder.shard(shard.index).read_bytes() for folder in (run.folder, finished_run.folder)
        )
        assert ours == theirs


def test_a_lane_makes_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    require_main_process()
    monkeypatch.setattr(multiprocessing.current_process(), "name", f"{_LANE_PROCESS}-0")
    with pytest.raises(UsageError, match="__main__"):
        require_main_process()
