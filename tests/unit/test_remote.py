"""Copies of remote files: noticed when they change, and never half of one; results that arrive complete."""

import base64
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from tests.made_storage import ObjectStorage, WebServer, storage, web
from virnuc_core.errors import (
    InputError,
    MismatchError,
    StorageError,
    StorageLostError,
    UsageError,
    VirnucError,
)
from virnuc_core.remote import is_url, output_path, require_place, require_shared_staging, stage_in, stage_out

__all__ = ["storage", "web"]

CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, set_env: Callable[..., None]) -> Path:
    set_env(VIRNUC_HOME=tmp_path / "home")
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


def test_a_file_of_a_web_server_is_copied_as_it_is(web: WebServer) -> None:
    web.files["/contigs.fa.gz"], url = CONTENT, f"{web.url}/contigs.fa.gz?download=1"
    web.headers.update({"ETag": '"1"', "Content-Encoding": "gzip"})
    path = stage_in(url)
    assert (path.name, path.read_bytes()) == ("contigs.fa.gz", CONTENT)
    web.files["/contigs.fa.gz"] = CONTENT[::-1]
    assert stage_in(url).read_bytes() == CONTENT
    web.headers["ETag"] = '"2"'
    assert stage_in(url).read_bytes() == CONTENT[::-1]


def test_half_a_copy_is_not_used(web: WebServer, home: Path) -> None:
    web.files["/contigs.fa"], web.left = CONTENT, 0
    with pytest.raises(StorageLostError, match=r"contigs\.fa cannot be reached"):
        stage_in(f"{web.url}/contigs.fa")
    assert not list(home.rglob("contigs.fa"))
    web.left = 1_000_000
    assert stage_in(f"{web.url}/contigs.fa").read_bytes() == CONTENT


def test_a_damaged_copy_is_thrown_away(web: WebServer, home: Path) -> None:
    web.files["/contigs.fa"] = b"x" + CONTENT[1:]
    web.headers["Content-MD5"] = base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
    with pytest.raises(StorageLostError, match="its copy is damaged"):
        stage_in(f"{web.url}/contigs.fa")
    assert not list(home.rglob("contigs.fa"))
    web.files["/contigs.fa"] = CONTENT
    assert stage_in(f"{web.url}/contigs.fa").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("WEB/nothing.fa", InputError, r"nothing\.fa does not exist"),
        ("WEB/%2e%2e", UsageError, "does not name a file"),
        ("STORAGE/nothing.fa", InputError, "does not exist"),
        ("STORAGE/folder", InputError, "is a folder"),
        ("s3://no-such-bucket/x.fa", InputError, "does not exist"),
        ("foo://a:key@host/contigs.fa", UsageError, "^foo://host/contigs.fa is not supported"),
        ("reference://host/contigs.fa", UsageError, "is not supported"),
        ("WEB/a%00b", UsageError, "does not name a file"),
        ("data://contigs.fa", StorageError, "is refused"),
        ("gs://bucket/contigs.fa", UsageError, r"pip install 'virnuc\[gcs\]'"),
    ],
)
def test_failures_say_what_to_do(
    web: WebServer,
    storage: ObjectStorage,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    kind: type[VirnucError],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    storage.put("folder/contigs.fa", CONTENT)
    with pytest.raises(kind, match=message) as raised:
        stage_in(url.replace("WEB", web.url).replace("STORAGE", storage.url))
    assert not raised.value.retryable


def test_missing_credentials_are_no_reason_to_try_again(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(StorageError, match="credentials") as raised:
        stage_in(f"{storage.url}/nothing.fa")
    assert not raised.value.retryable


@pytest.mark.parametrize("out", ["https://host/run", "s3://", "s3://bucket/.."])
def test_places_that_cannot_be_written(out: str) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        output_path(out)


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
