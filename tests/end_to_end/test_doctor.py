"""`virnuc doctor` in working and in broken environments."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.end_to_end.conftest import CommandLine
from virnuc_core import versions
from virnuc_core.doctor import comparison
from virnuc_core.env_config import reload
from virnuc_core.versions import KnownVersions


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    # Restores Prefect's settings after the test.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    reload()


def findings(virnuc: CommandLine, *flags: str) -> tuple[int, dict[tuple[str, str], dict[str, object]]]:
    result = virnuc("doctor", "--quick", "--json", *flags)
    found = json.loads(result.out)["findings"]
    return result.code, {(each["topic"], each["name"]): each for each in found}


def test_nothing_is_wrong_here(virnuc: CommandLine) -> None:
    result = virnuc("doctor", "--quick")
    assert result.code == 0, result.out
    lines = result.out.splitlines()
    assert all(line.startswith(("ok", "warning", "         ->")) for line in lines[:-1])
    assert "0 problems" in lines[-1]
    assert result.err == ""


def test_only_what_is_not_fine(virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRNUC_PREDICT_PRECISON", "fp16")
    result = virnuc("doctor", "--quick", "--quiet")
    assert result.code == 0
    assert "settings: VIRNUC_PREDICT_PRECISON: nothing reads this variable" in result.out
    assert "-> did you mean VIRNUC_PREDICT_PRECISION?" in result.out
    assert "\nok " not in result.out


def test_a_home_that_cannot_be_written(
    virnuc: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIRNUC_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    reload()
    code, found = findings(virnuc)
    assert code == 2
    for name in (("host", "VIRNUC_HOME"), ("prefect", "import"), ("mlflow", "store")):
        assert found[name]["state"] == "problem", name


def test_servers_that_do_not_answer(
    virnuc: CommandLine, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{closed_port}")
    reload()
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{closed_port}/api"}):
        code, found = findings(virnuc)
    assert code == 2
    assert found["prefect", "server"]["state"] == "problem"
    assert f"127.0.0.1:{closed_port}/api does not answer" in str(found["prefect", "server"]["found"])
    assert "virnuc up" in str(found["prefect", "server"]["advice"])
    assert found["mlflow", "store"]["state"] == "problem"
    assert "secret" not in json.dumps(list(found.values()))


class OldPrefect(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'"3.1.0"' if self.path.endswith("/admin/version") else b"true"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def old_prefect() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OldPrefect)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/api"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_of_another_version(virnuc: CommandLine, old_prefect: str) -> None:
    with temporary_settings({PREFECT_API_URL: old_prefect}):
        code, found = findings(virnuc)
    assert code == 0
    assert found["prefect", "server"]["state"] == "warning"
    assert "version 3.1.0" in str(found["prefect", "server"]["found"])


@pytest.mark.parametrize(("package", "code"), [("torch", 5), ("fastapi", 2)])
def test_a_version_that_does_not_work(
    package: str, code: int, virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KnownVersions(package=package, part="compute", since="0", before="0.0.1", newer="problem")
    monkeypatch.setattr(versions.check_versions, "__defaults__", ((known,),))
    exit_code, found = findings(virnuc)
    assert exit_code == code
    assert "before 0.0.1" in str(found["versions", package]["advice"])


def test_a_settings_file_and_a_variable_that_are_wrong(
    virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("virnuc.toml").write_text("[predict]\nprecison = 'fp16'\n")
    code, found = findings(virnuc)
    assert code == 2
    assert "did you mean precision" in str(found["settings", "files"]["found"])
    Path("virnuc.toml").unlink()
    monkeypatch.setenv("VIRNUC_THREADS", "many")
    code, found = findings(virnuc)
    assert code == 2
    assert "VIRNUC_THREADS is 'many'" in str(found["devices", "all of it"]["found"])
    assert found["versions", "torch"]["state"] == "ok"


def test_a_model_is_compared_with_the_original(virnuc: CommandLine) -> None:
    result = virnuc("doctor", "--compare", "dnabert:tiny", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["is_same"]
    assert found["program"].startswith("transformers ")
    assert found["runs"][0]["largest_difference"] < 1e-4


@pytest.mark.parametrize(
    ("model", "program"), [("esm2:tiny", "transformers"), ("esm2_t4_made.pt", "fair-esm")]
)
def test_the_original_is_not_installed(
    model: str, program: str, virnuc: CommandLine, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("esm.pretrained", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    name = str(data_dir / "golden" / "esm2" / model) if model.endswith(".pt") else model
    result = virnuc("doctor", "--compare", name)
    assert result.code == 2
    assert f"needs {program}: pip install 'virnuc[reference]'." in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("tiny", 2, "give esm2:tiny or dnabert:tiny"),
        ("random:8M", 2, "has no files"),
        ("absent/model.pt", 4, "absent/model.pt"),
    ],
)
def test_what_cannot_be_compared(model: str, code: int, message: str, virnuc: CommandLine) -> None:
    result = virnuc("doctor", "--compare", model)
    assert (result.code, result.out) == (code, "")
    assert message in result.err


def test_vectors_that_differ_have_an_exit_code(
    virnuc: CommandLine, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bounds that rounding never meets.
    monkeypatch.setattr(comparison, "_LEAST_COSINES", {"fp32": 1.1})
    result = virnuc("doctor", "--compare", data_dir / "golden" / "esm2" / "esm2_t4_made.pt")
    assert result.code == 5
    assert result.out.splitlines()[-1] == "verdict: NOT the same"
