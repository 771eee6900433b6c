"""Whether this host and its device may compute what a worker has taken: a fault keeps the worker's slot, and so other work away."""

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.runtime import deployment

from tasks.server import server_time
from virnuc_core.device_record import MAX_FAILURES, settle_failures
from virnuc_core.doctor.preflight import host_fault, version_fault
from virnuc_core.env_config import child_environment, env
from virnuc_core.errors import HostError


def find_fault(require_folder: Callable[[], None], device: str) -> str | None:
    """Why this host, or its GPU, cannot compute; None when it can. `require_folder` raises HostError without the run's folder."""
    if fault := version_fault(deployment.version) or host_fault() or clock_fault():
        return fault
    try:
        require_folder()
    except HostError as error:
        return str(error)
    return device_fault(env().device_record, device)


def clock_fault() -> str | None:
    """Whether the clock of this host differs from the server's, by which lost runs are found and files have settled."""
    with get_client(sync_client=True) as client:
        # A server that is busy may say a time that is long past, but not three times in a row.
        skew = min(((datetime.now(UTC) - server_time(client)).total_seconds() for _ in range(3)), key=abs)
    if abs(skew) <= 30:
        return None
    return f"the clock of this host is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the Prefect server: synchronize it"


def device_fault(record: Path | None, device: str) -> str | None:
    """What is wrong with the device; a GPU is tried out before the first lane of a worker, and after a failure."""
    failures = settle_failures(record) if record else None
    if failures is not None and failures >= MAX_FAILURES:
        return (
            f"{failures} lanes in a row failed on this device: repair it and restart `virnuc server worker`"
        )
    if device != "cuda" or failures == 0:
        return None
    command = [sys.executable, "-m", "virnuc_core.doctor.preflight"]
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,  # the first import of torch from a network file system takes a minute
        )
    except subprocess.TimeoutExpired as error:
        return f"the GPU did not respond within {error.timeout:.0f} s"
    lines = done.stderr.strip().splitlines() or [f"the GPU check ended with exit code {done.returncode}"]
    return lines[-1] if done.returncode else None
