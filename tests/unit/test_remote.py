"""Copies of remote files: continued, checked, noticed when they change, and never half a result."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made_storage import ObjectStorage, WebServer, storage, web
from virnuc_core import remote
from virnuc_core.errors import InputError, MismatchError, StorageError, StorageLostError, UsageError
from virnuc_core.remote import is_url, output_path, require_place, require_shared_staging, stage_in, stage_out

__all__ = ["storage", "web"]

CONTENT = bytes(range(256)) * 40  # 10,240 bytes in ranges of 1,000


@pytest.fixture(autouse=True)
def home(tmp_path: Path, set_env: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    set_env(VIRNUC_HOME=tmp_path / "home")
    monkeypatch.setattr(remote, "_RANGE_BYTES", 1000)
    monkeypatch.setattr(remote, "_BATCH_BYTES", 2000)
    return tmp_path / "home"


def test_an_object_is_copied_once_and_again_when_it_changes(storage: ObjectStorage) -> None:
    url = storage.put("sample/contigs.fa.gz", CONTENT)
    path = stage_in(url)
    assert (path.name, path.read_bytes()) == ("contigs.fa.gz", CONTENT)
    before = path.stat().st_mtime_ns
    assert stage_in(url) == path
    assert path.stat().st_mtime_ns == before

    storage.put("sample/contigs.fa.gz", CONTENT[::-1])
    assert stage_in(url) == path
    assert path.read_bytes() == CONTENT[::-1]


def test_a_copy_that_was_cut_off_is_continued(web: WebServer) -> None:
    web.files["/contigs.fa"] = CONTENT
    web.left = 6  # the probe, and five ranges
    with pytest.raises(StorageLostError, match=r"contigs\.fa cannot be reached"):
        stage_in(f"{web.url}/contigs.fa")
    web.left, web.ranges = 1_000_000, []
    assert stage_in(f"{web.url}/contigs.fa").read_bytes() == CONTENT
    begins = sorted(int(asked[6:].partition("-")[0]) for asked in web.ranges)
    assert begins == [1, *range(4000, 10_240, 1000)]


def test_a_killed_copy_is_continued(web: WebServer, home: Path) -> None:
    web.files["/contigs.fa"], web.pause = CONTENT, 0.05
    code = (
        "import sys; from virnuc_core import remote; remote._RANGE_BYTES, remote._BATCH_BYTES = 1000, 2000; "
        "remote.stage_in(sys.argv[1])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, f"{web.url}/contigs.fa"], env={**os.environ}
    ) as process:
        while len(web.ranges) < 6:  # the probe, two batches, and the third begins
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    web.finish_requests()
    web.ranges, web.pause = [], 0.0
    assert stage_in(f"{web.url}/contigs.fa").read_bytes() == CONTENT
    begins = sorted(int(asked[6:].partition("-")[0]) for asked in web.ranges)
    assert begins == [1, *range(4000, 10_240, 1000)]


def test_a_server_without_ranges_is_read_whole(web: WebServer) -> None:
    web.files["/contigs.fa"], web.has_ranges = CONTENT, False
    assert stage_in(f"{web.url}/contigs.fa?download=1").read_bytes() == CONTENT


def test_a_damaged_copy_is_thrown_away(web: WebServer) -> None:
    web.files["/contigs.fa"] = CONTENT
    web.headers["Content-MD5"] = "1B2M2Y8AsgTpgAmY7PhCfg=="  # of nothing
    url = f"{web.url}/contigs.fa"
    with pytest.raises(StorageLostError, match="has the MD5"):
        stage_in(url)
    web.files["/contigs.fa"] = b"x" + CONTENT[1:]
    with pytest.raises(StorageLostError, match="has the MD5"):
        stage_in(url)
    # Twice the same: then what the server says is no MD5.
    assert stage_in(url).read_bytes() == b"x" + CONTENT[1:]


def test_failures_say_what_to_do(
    web: WebServer, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"nothing\.fa does not exist"):
        stage_in(f"{web.url}/nothing.fa")
    with pytest.raises(InputError, match="does not exist"):
        stage_in(f"{storage.url}/nothing.fa")
    with pytest.raises(UsageError, match="cannot be used as an address"):
        stage_in("foo://host/contigs.fa")
    with pytest.raises(UsageError, match="--out https://host/run cannot be written"):
        output_path("https://host/run")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match=r"pip install 'virnuc\[gcs\]'"):
        stage_in("gs://bucket/contigs.fa")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    type(remote._Remote.open("s3://x/y").files).clear_instance_cache()
    with pytest.raises(StorageError, match="credentials") as raised:
        stage_in(f"{storage.url}/nothing.fa")
    assert not raised.value.retryable


def test_messages_hold_no_secrets(web: WebServer) -> None:
    place = web.url.removeprefix("http://")
    with pytest.raises(InputError) as raised:
        stage_in(f"http://user:password@{place}/nothing.fa?X-Amz-Signature=secret")
    assert str(raised.value).startswith(f"http://{place}/nothing.fa?... does not exist")


def test_a_server_that_is_gone_is_worth_a_retry(storage: ObjectStorage) -> None:
    url = storage.put("contigs.fa", CONTENT)
    storage.stop()
    with pytest.raises(StorageLostError, match="cannot be reached"):
        stage_in(url)
    storage.start()
    assert stage_in(url).read_bytes() == CONTENT
    with WebServer().running() as web:
        pass
    with pytest.raises(StorageLostError, match="cannot be reached"):
        stage_in(f"{web.url}/contigs.fa")


def test_results_are_uploaded_once_and_the_report_is_last(storage: ObjectStorage, tmp_path: Path) -> None:
    report, table = tmp_path / "run.json", tmp_path / "contigs.tsv"
    table.write_bytes(CONTENT)
    report.write_text("{}")
    url = f"{storage.url}/run"
    files, place = {table: f"{url}/contigs.tsv"}, f"{url}/run.json"
    stage_out(files, report, place)
    assert (storage.get("run/contigs.tsv"), storage.get("run/run.json")) == (CONTENT, b"{}")
    before = storage.written
    stage_out(files, report, place)
    assert storage.written == before

    report.write_text("{ }")
    missing = tmp_path / "missing.tsv"
    with pytest.raises(FileNotFoundError):
        stage_out({**files, missing: f"{url}/missing.tsv"}, report, place)
    assert "run/run.json" not in storage.written  # no reader takes the old report for that of new files
    assert storage.written["run/contigs.tsv"] == before["run/contigs.tsv"]


def test_a_place_is_checked_before_the_computation(storage: ObjectStorage) -> None:
    url = f"{storage.url}/run"
    require_place(url, "a" * 64, force=False)
    assert storage.written == {}
    storage.put("run/run.json", b'{"plan_fingerprint": "%s"}' % (b"b" * 64))
    with pytest.raises(MismatchError, match="other inputs"):
        require_place(url, "a" * 64, force=False)
    require_place(url, "a" * 64, force=True)
    require_place(url, "b" * 64, force=False)
    with pytest.raises(StorageError, match="does not exist"):
        require_place("s3://no-such-bucket/run", "a" * 64, force=False)


def test_names(home: Path, set_env: Callable[..., None]) -> None:
    assert [is_url(name) for name in ("s3://b/x", "gs://b/x", "/a/b", "C:/x", "esm2:tiny")] == [True] * 2 + [
        False
    ] * 3
    out = output_path("s3://b/results/run/")
    assert (
        out == home / "staging" / "outputs" / hashlib.sha256(b"s3://b/results/run").hexdigest()[:12] / "run"
    )
    assert output_path("run") == Path("run")
    with pytest.raises(UsageError, match="VIRNUC_STAGING"):
        require_shared_staging("s3://b/x")
    set_env(VIRNUC_STAGING=home / "shared")
    require_shared_staging("s3://b/x")
    assert output_path("s3://b/x").is_relative_to(home / "shared")
