"""Who gets into the servers of `virnuc server up`, and what it takes from the folder in which it was started."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from websockets import InvalidStatus, Origin
from websockets.sync.client import connect

from tests.production.conftest import Stack, access_of, hostile_folder
from virnuc_core.errors import UsageError

HTTP = httpx.Client(timeout=120)  # the machine may be busy
EVIL = "http://evil.example"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module", autouse=True)
def connections() -> Iterator[None]:
    with HTTP:
        yield


def searches(stack: Stack) -> dict[str, str]:
    """An address of each server that answers POST with what it has."""
    return {
        "prefect": f"http://127.0.0.1:{stack.port}/api/flow_runs/filter",
        "mlflow": f"http://127.0.0.1:{stack.mlflow_port}/api/2.0/mlflow/experiments/search",
    }


def password(stack: Stack) -> tuple[str, str]:
    return stack.access["MLFLOW_TRACKING_USERNAME"], stack.access["MLFLOW_TRACKING_PASSWORD"]


def csrf(stack: Stack) -> dict[str, str]:
    """The headers that Prefect's clients send with what changes something."""
    url = f"http://127.0.0.1:{stack.port}/api/csrf-token"
    answer = HTTP.get(url, params={"client": "test"}, auth=password(stack)).raise_for_status()
    return {"Prefect-Csrf-Client": "test", "Prefect-Csrf-Token": answer.json()["token"]}


@pytest.mark.parametrize("server", ["prefect", "mlflow"])
@pytest.mark.parametrize("with_password", [False, True])
@pytest.mark.parametrize(
    "foreign",
    [{"Origin": EVIL}, {"Origin": "http://127.0.0.1:9"}, {"Origin": "null"}, {"Host": "evil.example"}],
)
def test_a_foreign_page_is_refused(
    stack: Stack, server: str, foreign: dict[str, str], with_password: bool
) -> None:
    """With the password, too, which a browser that knows it may add by itself."""
    url, auth = searches(stack)[server], password(stack) if with_password else None
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    answers = [HTTP.options(url, headers={**foreign, **preflight}, auth=auth)]
    for kind in ("text/plain", "application/json"):
        headers = {**foreign, **csrf(stack), "Content-Type": kind}
        answers.append(HTTP.post(url, headers=headers, content='{"max_results": 1}', auth=auth))
    health = "/api/health" if server == "prefect" else "/health"
    answers.append(HTTP.get(str(httpx.URL(url).join(health)), headers=foreign))
    assert [answer.status_code for answer in answers] == [403] * 4
    assert not any("access-control-allow-origin" in answer.headers for answer in answers)


@pytest.mark.parametrize("server", ["prefect", "mlflow"])
def test_the_password_opens_and_nothing_else_does(stack: Stack, server: str) -> None:
    url = searches(stack)[server]
    own = {**JSON, **csrf(stack), "Origin": str(httpx.URL(url).join("/")).rstrip("/")}
    ask = partial(HTTP.post, url, content='{"max_results": 1}', headers=own)
    assert ask().status_code == 401
    assert ask(auth=("virnuc", "")).status_code == 401
    assert ask(auth=("virnuc", "wrong")).status_code == 401
    ask(auth=password(stack)).raise_for_status()
    if server == "prefect":  # which wants its token, too
        assert HTTP.post(url, json={}, auth=password(stack)).status_code == 403
    root = httpx.URL(url).join("/")
    closed = ["api/metrics", "api/admin/settings"] if server == "prefect" else ["", "metrics", "version"]
    assert {HTTP.get(root.join(path)).status_code for path in closed} == {401}


def test_a_foreign_page_opens_no_socket(stack: Stack) -> None:
    """On which Prefect gives and takes events."""
    for path in ("in", "out"):
        url = f"ws://127.0.0.1:{stack.port}/api/events/{path}"
        with pytest.raises(InvalidStatus) as refused:
            connect(url, origin=Origin(EVIL), open_timeout=30)
        assert refused.value.response.status_code == 403


def test_the_password_opens_both_pages_in_a_browser(stack: Stack) -> None:
    from tests.made_browser import chromium

    user, secret = password(stack)
    with chromium() as browser:
        signed_in = browser.new_context(http_credentials={"username": user, "password": secret})
        page = signed_in.new_page()
        page.goto(f"http://127.0.0.1:{stack.mlflow_port}")
        page.get_by_text("Experiments").first.wait_for(timeout=60_000)

        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{stack.port}")
        page.locator("input").first.fill(stack.access["PREFECT_API_AUTH_STRING"])
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard**", timeout=60_000)
        page.get_by_text("Work Pools").first.click()
        page.get_by_text("virnuc-cpu").first.wait_for(timeout=60_000)


def test_the_home_folder_is_its_owners_alone_and_the_password_in_no_command(stack: Stack) -> None:
    """`virnuc server up` was started under a umask that takes nothing away, in a folder with hostile files."""
    files = ("mlflow.db", "prefect/prefect.db", "up/access.sh", "up/prefect.log", "up/worker.log")
    for path in (stack.home, *(stack.home / name for name in ("prefect", "up", *files))):
        assert not path.stat().st_mode & 0o077, path
    assert password(stack)[1] not in subprocess.check_output(["ps", "-ewwo", "args"], text=True)
    data = stack.home.parent / "data"
    assert (data / "random.py").exists()
    assert list(data.glob("ran-*")) == []


def test_a_worker_uses_nothing_of_its_working_folder(stack: Stack, tmp_path: Path) -> None:
    """It is refused, since the CPU of this host is taken, when it has read its settings."""
    folder = hostile_folder(tmp_path / "data")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "virnuc_cli", "server", "worker", "--devices", "cpu", "--workers", "2"],
        env={**access_of(stack.home), "VIRNUC_HOME": str(stack.home), "PATH": "/usr/bin:/bin"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == UsageError.exit_code, done.stderr
    assert "is already running" in done.stderr
    assert list(folder.glob("ran-*")) == []
