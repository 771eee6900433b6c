from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.publishing import link_run, params_of, prefect_tags
from tasks.tracking import tracked_run
from tests.made_plans import PLAN
from virnuc_core.env_config import env


@pytest.mark.parametrize("pages", [None, "http://prefect.example"])
def test_link_is_left_out_where_a_temporary_server_has_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str | None
) -> None:
    url = f"{pages}/flow-runs/flow-run/1"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__UI_URL", url)
    assert prefect_tags(tmp_path).get("prefect.flow_run_url") == (url if pages else None)


def test_params_are_every_setting_of_plan_and_run() -> None:
    params = params_of(PLAN)
    assert (params["chunk_length"], params["shards"]) == (500, 2)
    for family in ("esm2", "dnabert_s"):
        assert params[f"{family}_embedding_dim"] == 8
        assert params[f"{family}_weights_fingerprint"] == "a" * 64


def test_run_without_a_flow_is_tied_to_its_inputs_alone(tmp_path: Path) -> None:
    with tracked_run("sample", {}, {}) as run:
        link_run(run, PLAN.inputs, [str(tmp_path / "in.fa")])
    kept = MlflowClient(f"sqlite:///{env().home / 'mlflow.db'}").get_run(str(run.run_id))
    assert [found.dataset.name for found in kept.inputs.dataset_inputs] == ["in.fa"]
