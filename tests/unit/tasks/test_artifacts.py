"""Progress bars in Prefect: how often they move, and a server that fails."""

from typing import Any
from uuid import UUID

import httpx
import prefect.artifacts
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import artifacts
from tasks.artifacts import ProgressArtifact, show_markdown

# Prefect warns outside a flow; tests with a real server use flows.
pytestmark = pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow:FutureWarning")


@pytest.fixture(autouse=True)
def _in_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "in_flow", lambda: True)


def test_bar_moves_now_and_then_and_a_server_that_fails_costs_one_try_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[float] = []
    errors: list[Exception] = []

    def take(percent: float) -> None:
        if errors:
            raise errors.pop()
        taken.append(percent)

    def create(percent: float, *_: Any) -> UUID:
        take(percent)
        return UUID(int=7)

    monkeypatch.setattr(prefect.artifacts, "create_progress_artifact", create)
    monkeypatch.setattr(prefect.artifacts, "update_progress_artifact", lambda _, percent: take(percent))
    bar = ProgressArtifact("virnuc-lane-0", "Lane 0")
    for percent in (10, 20, 30, 100):
        bar.update(percent)
    assert taken == [0.0, 100.0]
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_UPDATES", 0.0)
    monkeypatch.setattr(artifacts, "SECONDS_BETWEEN_TRIALS", 0.0)
    errors += [httpx.ConnectError("away")] * 2
    for percent in (40, 50, 60):
        bar._next_update = 0.0
        bar.update(percent)
    assert taken == [0.0, 100.0, 60.0]
    assert [record.levelname for record in caplog.records if record.name == artifacts.__name__] == [
        "WARNING"
    ] * 2


def test_server_that_is_gone_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        show_markdown("virnuc-summary", "# verdict")
    assert "rejected an artifact" in caplog.text
