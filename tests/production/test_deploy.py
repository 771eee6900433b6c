"""What `virnuc server up` makes, and how it ends; tests/end_to_end/test_deploy.py tests what is deployed."""

import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.conftest import wait_until
from tests.production.conftest import Stack, processes_of, running_stack


def test_both_servers_give_metrics(stack: Stack) -> None:
    auth = (stack.access["MLFLOW_TRACKING_USERNAME"], stack.access["MLFLOW_TRACKING_PASSWORD"])
    mlflow = f"http://127.0.0.1:{stack.mlflow_port}"
    with httpx.Client(auth=auth, timeout=60) as http:
        prefect = http.get(f"http://127.0.0.1:{stack.port}/api/metrics").raise_for_status().text
        http.get(f"{mlflow}/api/2.0/mlflow/experiments/get?experiment_id=0").raise_for_status()
        counted = http.get(f"{mlflow}/metrics").raise_for_status().text
    assert "process_resident_memory_bytes" in prefect
    assert "prefect_" in prefect
    assert 'mlflow_http_request_total{method="GET",status="200"}' in counted


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["MLflow", "virnuc server up"])
def test_everything_ends_with_one_of_its_programs_and_when_it_is_killed_itself(
    tmp_path: Path, killed: str
) -> None:
    with running_stack(tmp_path, code=1 if killed == "MLflow" else -signal.SIGKILL) as stack:
        program = stack.program("mlflow")
        assert program is not None
        (program if killed == "MLflow" else psutil.Process(stack.process.pid)).kill()
        stack.process.wait(60)
        wait_until(lambda: processes_of(stack.home) == [], 60)
    output = (tmp_path / "up.log").read_text()
    assert (f"mlflow ended with exit code -9. Last lines of {stack.home}/up/mlflow.log" in output) is (
        killed == "MLflow"
    )
