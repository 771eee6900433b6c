"""Names of flow runs, and checks of their paths."""

from pathlib import Path

import pytest
from prefect.runtime import flow_run

from flows.lanes import journal_name, lane_kind
from flows.pool import absolute_path
from flows.recording import require_absolute, run_name
from tasks import artifacts
from virnuc_core.errors import UsageError
from virnuc_core.settings import PredictSettings
from virnuc_core.training.labels import LabelledFiles

FILES = {"viral": ("contigs.fa",), "other": ("absent.fa",)}


@pytest.mark.parametrize(
    ("flow", "parameters", "expected"),
    [
        (
            "predict",
            {"inputs": ["contigs.fa", "absent.fa"], "settings": PredictSettings()},
            "predict contigs.fa and 1 more tiny 1.26 MB",
        ),
        (
            "embed",
            {"inputs": ["contigs.fa"], "model": "esm2:8M", "settings": None},
            "embed contigs.fa esm2:8M 1.26 MB",
        ),
        ("train", {"files": FILES, "settings": None}, "train contigs.fa and 1 more 1.26 MB"),
        ("train", {"files": LabelledFiles(**FILES), "settings": None}, "train contigs.fa and 1 more 1.26 MB"),
    ],
)
def test_names_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: str, parameters: dict[str, object], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("contigs.fa").write_bytes(b"A" * 1_260_000)
    monkeypatch.setitem(flow_run.FIELDS, "parameters", lambda: parameters)
    monkeypatch.setitem(flow_run.FIELDS, "flow_name", lambda: flow)
    assert run_name() == expected


def test_names_of_journals() -> None:
    assert journal_name(lane_kind(3), "0123abcd-456789ab") == "lane-0003-456789ab"
    assert journal_name("plan", "0123abcd-456789ab") == "plan-456789ab"


def test_a_deployed_run_needs_absolute_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    require_absolute("a.fa", "/data/b.fa", "out")
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "of-a-deployment")
    require_absolute("a.fa")  # outside of a flow
    monkeypatch.setattr(artifacts, "in_flow", lambda: True)
    require_absolute("/data/b.fa", "/out")
    with pytest.raises(UsageError, match=r"^a\.fa, out: give absolute paths"):
        require_absolute("a.fa", "/data/b.fa", "out")


def test_a_path_is_a_model_where_no_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in the pool has another folder, and must mean the same models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "650M").mkdir()
    (tmp_path / "mine.pt").symlink_to(tmp_path / "blob")
    (tmp_path / "blob").touch()
    assert absolute_path("650M") == "650M"
    assert absolute_path("./650M") == str(tmp_path / "650M")
    assert absolute_path("mine.pt") == str(tmp_path / "mine.pt")
    assert absolute_path("absent.pt") == "absent.pt"
