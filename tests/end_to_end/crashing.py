"""A flow whose process is killed in each of its attempts, as on a host that fails."""

import os
import signal

from prefect import flow


@flow(name="crashing")
def crash() -> None:
    """Ends its process."""
    os.kill(os.getpid(), signal.SIGKILL)
