from pathlib import Path

import pytest

from tasks.publishing import prefect_tags


@pytest.mark.parametrize("pages", [None, "http://prefect.example"])
def test_link_is_left_out_where_a_temporary_server_has_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str | None
) -> None:
    url = f"{pages}/flow-runs/flow-run/1"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__UI_URL", url)
    assert prefect_tags(tmp_path).get("prefect.flow_run_url") == (url if pages else None)
