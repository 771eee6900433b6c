"""Whether MLflow's store is reachable and writable."""

import os
import tempfile
from typing import Final

import httpx

from tasks.tracking import open_store
from virnuc_core.env_config import env

_ANSWER_WITHIN_S: Final = 5.0


def check_store() -> str:
    """Opens the configured store as a run does, creating the experiment if missing.

    Returns:
        Why it cannot be used; "" when it can.
    """
    uri = env().tracking_uri
    if uri is not None and uri.startswith(("http://", "https://")):
        # MLflow's client would retry for minutes.
        try:
            httpx.get(f"{uri.rstrip('/')}/health", timeout=_ANSWER_WITHIN_S).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return str(error)
    if uri is None:
        home = env().home
        try:
            home.mkdir(parents=True, exist_ok=True)
            # SQLite creates files beside its database.
            with tempfile.TemporaryFile(dir=home):
                pass
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
    return open_store()
