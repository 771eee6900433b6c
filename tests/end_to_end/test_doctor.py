"""`virnuc doctor` in working and in broken environments."""

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import CommandLine
from tests.made_models import ESM2
from virnuc_core import versions
from virnuc_core.doctor import comparison
from virnuc_core.env_config import reload
from virnuc_core.versions import KnownVersions


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    reload()


def findings(virnuc: CommandLine) -> tuple[int, dict[tuple[str, str], Any]]:
    result = virnuc("doctor", "--quick", "--json")
    return result.code, {(each["topic"], each["name"]): each for each in result.document["findings"]}


def test_nothing_is_wrong_here(virnuc: CommandLine) -> None:
    result = virnuc.done("doctor", "--quick")
    *lines, last = result.out.splitlines()
    assert all(line.startswith(("ok", "warning", "         ->")) for line in lines)
    assert "0 problems" in last
    assert result.err == ""


def test_only_what_is_not_fine(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_PREDICT_PRECISON", "fp16")
    out = virnuc.done("doctor", "--quick", "--quiet").out
    assert "settings: VIRNUC_PREDICT_PRECISON: nothing reads this variable" in out
    assert "-> did you mean VIRNUC_PREDICT_PRECISION?" in out
    assert "\nok " not in out


def test_a_home_that_cannot_be_written(
    virnuc: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    reload()
    code, found = findings(virnuc)
    assert code == 2
    for name in (("host", "VIRNUC_HOME"), ("mlflow", "store")):
        assert found[name]["state"] == "problem", name


def test_servers_that_do_not_answer(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@{closed}")
    reload()
    monkeypatch.setenv("PREFECT_API_URL", f"http://{closed}/api")
    code, found = findings(virnuc)
    assert code == 2
    server = found["prefect", "server"]
    assert server["state"] == found["mlflow", "store"]["state"] == "problem"
    assert f"{closed}/api does not answer" in server["found"]
    assert "virnuc up" in server["advice"]
    assert "secret" not in json.dumps(list(found.values()))


class OldPrefect(BaseHTTPRequestHandler):
    """Knows the client with the password me:secret alone."""

    def do_GET(self) -> None:
        body = b'"3.1.0"' if self.path.endswith("/admin/version") else b"true"
        self.send_response(200 if self.headers["Authorization"] == "Basic bWU6c2VjcmV0" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()
        thread.join()


@pytest.fixture
def old_prefect() -> Iterator[str]:
    with serving(OldPrefect) as url:
        yield url


def test_other_versions_of_the_server_and_of_torch(
    virnuc: CommandLine, old_prefect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KnownVersions(package="torch", part="compute", since="0", before="0.0.1", newer="problem")
    monkeypatch.setattr(versions.check_versions, "__defaults__", ((known,),))
    monkeypatch.setenv("PREFECT_API_URL", old_prefect)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:secret")
    code, found = findings(virnuc)
    assert code == 5
    assert "before 0.0.1" in found["versions", "torch"]["advice"]
    assert found["prefect", "server"]["state"] == "warning"
    assert "version 3.1.0" in found["prefect", "server"]["found"]


def test_a_server_that_does_not_know_the_password(
    virnuc: CommandLine, old_prefect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", old_prefect)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:wrong")
    _, found = findings(virnuc)
    assert found["prefect", "server"]["state"] == "problem"
    assert "not authorized" in found["prefect", "server"]["found"]
    assert "PREFECT_API_AUTH_STRING" in found["prefect", "server"]["advice"]


def test_a_settings_file_and_a_variable_that_are_wrong(
    virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("virnuc.toml").write_text("[predict]\nprecison = 'fp16'\n")
    code, found = findings(virnuc)
    assert code == 2
    assert "did you mean precision" in found["settings", "files"]["found"]
    Path("virnuc.toml").unlink()
    monkeypatch.setenv("VIRNUC_THREADS", "many")
    code, found = findings(virnuc)
    assert code == 2
    assert "VIRNUC_THREADS is 'many'" in found["devices", "all of it"]["found"]
    assert found["versions", "torch"]["state"] == "ok"


def test_a_model_is_compared_with_the_original(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = virnuc.done("doctor", "--compare", "dnabert:tiny", "--json").document
    assert found["is_same"]
    assert found["program"].startswith("transformers ")
    assert found["runs"][0]["largest_difference"] < 1e-4
    # Bounds that rounding never meets.
    monkeypatch.setattr(comparison, "_LEAST_COSINES", {"fp32": 1.1})
    result = virnuc("doctor", "--compare", ESM2)
    assert result.code == 5
    assert result.out.splitlines()[-1] == "verdict: NOT the same"


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("tiny", 2, "give esm2:tiny or dnabert:tiny"),
        ("random:8M", 2, "has no files"),
        ("absent/model.pt", 4, "absent/model.pt"),
        ("esm2:tiny", 2, "needs transformers: pip install 'virnuc[reference]'."),
        (str(ESM2), 2, "needs fair-esm: pip install 'virnuc[reference]'."),
    ],
)
def test_what_cannot_be_compared(
    model: str, code: int, message: str, virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("esm.pretrained", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    virnuc.refused(code, message, "doctor", "--compare", model)
