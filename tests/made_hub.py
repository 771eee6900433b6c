"""A small real model hub on localhost."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers a client's requests; large files are identified by SHA-256, small ones by Git's SHA-1.

    Attributes:
        repositories: files by name, by repository.
        revision: commit of all of them.
        sent: other content, by repository and file, than the hub has hashes of.
    """

    protocol_version = "HTTP/1.1"
    repositories: Mapping[str, Mapping[str, bytes]]
    revision: str
    sent: Mapping[str, bytes]

    def do_HEAD(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        name = path.rpartition("/")[2]
        repo = next((repo for repo in self.repositories if repo in path), "absent/absent")
        files = self.repositories.get(repo, {})
        infos = [f"api/models/{repo}{at}" for at in ("", "/revision/main", f"/revision/{self.revision}")]
        if path in infos:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repo, "modelId": repo, "sha": self.revision, "siblings": siblings}
            self.answer(json.dumps(info).encode())
        elif path == f"api/models/{repo}/tree/{self.revision}":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": git_sha1(body)}
                for name, body in files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path == f"{repo}/resolve/{self.revision}/{name}" and name in files:
            headers = {"X-Repo-Commit": self.revision, "ETag": f'"{git_sha1(files[name])}"'}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(files[name]).hexdigest()
                headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(files[name]))}
            self.answer(self.sent.get(f"{repo}/{name}", files[name]), headers)
        else:
            self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    do_GET = do_HEAD

    def answer(self, body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


def git_sha1(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


@contextmanager
def running_hub(
    repositories: Mapping[str, Mapping[str, bytes]],
    revision: str = COMMIT,
    sent: Mapping[str, bytes] | None = None,
) -> Iterator[str]:
    """Yields the address."""
    Hub.repositories, Hub.revision, Hub.sent = repositories, revision, sent or {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
