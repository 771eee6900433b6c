"""Hosts made on this machine: each with its own name, machine id, network, mounts and VIRNUC_HOME. Needs root."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

# A documentation range, so that nothing real is shadowed (RFC 5737).
_NETWORK = "198.51.100"
_LIFE = """
set -e
hostname "$1"
mount --bind "$2" /etc/machine-id
[ -z "$3" ] || mount -t tmpfs none "$3"
shift 3
exec "$@"
"""


@dataclass(kw_only=True, slots=True)
class MadeHost:
    """A host whose processes reach the others over a bridge.

    Attributes:
        hidden: a folder that this host does not see.
    """

    name: str
    namespace: str
    address: str
    home: Path
    server: str
    hidden: Path | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Runs a Python module on this host; its output is appended to `log`."""
        unset = ("PREFECT_", "MLFLOW_", "VIRNUC_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
        own = {"VIRNUC_HOME": str(self.home), "PREFECT_API_URL": self.server, "VIRNUC_THREADS": "1"}
        identity = ("sh", self.name, str(self.home / "machine-id"), str(self.hidden or ""))
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount"),
                    *("sh", "-c", _LIFE, *identity, sys.executable, "-m", *command),
                ],
                env={**inherited, **own, **environment},
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    @property
    def log(self) -> Path:
        return self.home / "log"

    def die(self) -> None:
        """Kills every process of the host at once, as a power failure does."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextmanager
def made_hosts(names: list[str], folder: Path, port: int) -> Iterator[list[MadeHost]]:
    """Hosts with these names, which may be the same; the first one's `address` and `port` are the Prefect server's.

    The test itself reaches them, too. Skips without the right to make them.
    """
    tag = uuid4().hex[:6]
    bridge = f"vnb{tag}"

    def ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    hosts: list[MadeHost] = []
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{_NETWORK}.254/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for number, name in enumerate(names, start=1):
                namespace, link = f"virnuc-{tag}-{number}", f"vn{tag}{number}"
                home = folder / f"host-{number}"
                home.mkdir()
                (home / "machine-id").write_text(f"{uuid4().hex}\n")
                host = MadeHost(
                    name=name,
                    namespace=namespace,
                    address=f"{_NETWORK}.{number}",
                    home=home,
                    server=f"http://{_NETWORK}.1:{port}/api",
                )
                ip("netns", "add", namespace)
                hosts.append(host)
                ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
                ip("link", "set", link, "master", bridge, "up")
                ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-n", namespace, "link", "set", device, "up")
        except (PermissionError, FileNotFoundError) as error:
            pytest.skip(f"hosts cannot be made on this machine: {error}")
        yield hosts
    finally:
        for host in hosts:
            host.die()
            ip("netns", "delete", host.namespace)
        with suppress(PermissionError, FileNotFoundError):
            ip("link", "delete", bridge)
