"""A web server whose answers a test can disturb, and object storage, both real and in this process."""

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer


class WebServer:
    """Serves files.

    Attributes:
        left: requests that are still answered with content; the others are cut off in the middle.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.left = 1_000_000
        self.url = ""

    @contextmanager
    def running(self) -> Iterator["WebServer"]:
        state = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._begin(state.files.get(self.path.partition("?")[0]))

            def do_GET(self) -> None:
                content = state.files.get(self.path.partition("?")[0])
                self._begin(content)
                state.left -= 1
                self.wfile.write((content or b"")[: None if state.left >= 0 else len(content or b"") // 2])

            def _begin(self, content: bytes | None) -> None:
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                for name, value in state.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class ObjectStorage:
    """S3 on one port; what it holds survives a pause."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.host, self.port = self._server.get_host_and_port()
        self._bucket = secrets.token_hex(8)  # moto keeps what it holds as long as the process lives
        self.url = f"s3://{self._bucket}"
        self._client = boto3.client(
            "s3", endpoint_url=f"http://{self.host}:{self.port}", region_name="us-east-1"
        )
        self._client.create_bucket(Bucket=self._bucket)

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def put(self, name: str, content: bytes) -> str:
        self._client.put_object(Bucket=self._bucket, Key=name, Body=content)
        return f"{self.url}/{name}"

    def get(self, name: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()
        return content

    @property
    def written(self) -> dict[str, Any]:
        """When each object was written."""
        found = self._client.list_objects_v2(Bucket=self._bucket).get("Contents", ())
        return {item["Key"]: item["LastModified"] for item in found}


@contextmanager
def object_storage(set_env: Callable[..., None]) -> Iterator[ObjectStorage]:
    """Object storage that fsspec finds by the environment."""
    names = {"AWS_ACCESS_KEY_ID": "made", "AWS_SECRET_ACCESS_KEY": "made", "AWS_DEFAULT_REGION": "us-east-1"}
    set_env(**names, AWS_MAX_ATTEMPTS=1)
    storage = ObjectStorage()
    set_env(AWS_ENDPOINT_URL=f"http://{storage.host}:{storage.port}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of an earlier server
    try:
        yield storage
    finally:
        storage.stop()


@pytest.fixture
def storage(set_env: Callable[..., None]) -> Iterator[ObjectStorage]:
    with object_storage(set_env) as made:
        yield made


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer().running() as server:
        yield server
