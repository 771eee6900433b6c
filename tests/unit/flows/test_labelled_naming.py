from pathlib import Path

import pytest
from prefect.runtime import flow_run

from flows.labelled_naming import labelled_name
from virnuc_core.training.labels import LabelledFiles


def test_a_training_is_named_by_what_is_learnt_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viral, other = tmp_path / "viral.fa", tmp_path / "other.fa"
    for path in (viral, other):
        path.write_bytes(b"A" * 5000)
    files = {"viral": (str(viral),), "other": (str(other),)}
    monkeypatch.setitem(flow_run.FIELDS, "flow_name", lambda: "train")
    for given in (files, LabelledFiles(**files)):
        monkeypatch.setitem(flow_run.FIELDS, "parameters", lambda given=given: {"files": given})
        assert labelled_name() == "train viral.fa and 1 more 10 kB"
