from pathlib import Path

import pytest

from flows.computed_run import labelled_name, run_name
from flows.lanes import lane_journal_name, lane_name, plan_journal_name, plan_name
from flows.reprocess import reprocess_name
from virnuc_core.settings import PredictSettings
from virnuc_core.training.labels import LabelledFiles


@pytest.fixture
def set_parameters(monkeypatch: pytest.MonkeyPatch) -> "SetParameters":
    return SetParameters(monkeypatch)


class SetParameters:
    """Generates a name inside a run with these parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, flow_name: str, parameters: dict[str, object]) -> None:
        from prefect.runtime import flow_run

        self._monkeypatch.setitem(flow_run.FIELDS, "parameters", lambda: parameters)
        self._monkeypatch.setitem(flow_run.FIELDS, "flow_name", lambda: flow_name)


def test_run_is_named_by_what_goes_in(set_parameters: SetParameters, tmp_path: Path) -> None:
    (tmp_path / "contigs.fa").write_bytes(b"A" * 1_260_000)
    inputs = [str(tmp_path / "contigs.fa"), str(tmp_path / "absent.fa")]
    set_parameters("predict", {"inputs": inputs, "settings": PredictSettings()})
    assert run_name() == "predict contigs.fa and 1 more tiny 1.26 MB"
    set_parameters("embed", {"inputs": inputs[:1], "model": "esm2:8M", "settings": None})
    assert run_name() == "embed contigs.fa esm2:8M 1.26 MB"


def test_lane_is_named_by_its_device_or_its_size(set_parameters: SetParameters) -> None:
    set_parameters("embed-lane", {"lane": 3, "device": "cuda:1", "shards": (1, 2)})
    assert lane_name() == "lane-3-cuda:1"
    set_parameters("embed-lane", {"lane": 3, "device": "auto", "shards": (1, 2)})
    assert lane_name() == "lane-3 2 shards"
    assert lane_journal_name(3, "0123abcd-4567") == "lane-0003-0123abcd"


def test_plan_is_named_by_its_folder(set_parameters: SetParameters) -> None:
    set_parameters("plan-run", {"folder": "/data/results"})
    assert plan_name() == "plan results"
    assert plan_journal_name("0123abcd-4567") == "plan-0123abcd"


def test_a_move_is_named_by_its_folder(set_parameters: SetParameters) -> None:
    set_parameters("reprocess", {"run": "/data/results"})
    assert reprocess_name() == "reprocess results"


def test_a_training_is_named_by_its_files(set_parameters: SetParameters, tmp_path: Path) -> None:
    viral, other = tmp_path / "viral.fa", tmp_path / "other.fa"
    for path in (viral, other):
        path.write_bytes(b"A" * 5000)
    files = {"viral": (str(viral),), "other": (str(other),)}
    for given in (files, LabelledFiles(**files)):
        set_parameters("train", {"files": given})
        assert labelled_name() == "train viral.fa and 1 more 10 kB"
