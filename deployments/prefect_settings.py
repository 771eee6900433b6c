"""Prefect's settings for the commands that use it, and log lines of the programs that they start."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from virnuc_core.env_config import env, home_folder
from virnuc_core.errors import UsageError
from virnuc_core.files import make_private
from virnuc_core.plain_text import hide_secrets_in_logs
from virnuc_core.versions import log_version_warnings


def prepare_prefect() -> None:
    """Sets the variables that Prefect reads on first import; the user's own take precedence.

    Sharing `~/.prefect` with other projects would let a Prefect of another version migrate its database, after which neither
    can read it. A server in the user's profile is still used.

    Raises:
        UsageError: the home folder is not writable.
    """
    hide_secrets_in_logs()
    log_version_warnings()
    home = home_folder("prefect").resolve()
    if env().prefect_home is None:
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"home folder {home.parent} of virnuc is not writable ({error.strerror}): set VIRNUC_HOME to a writable folder."
            ) from error
        make_private(home / "prefect.db")
        profiles = Path("~/.prefect/profiles.toml").expanduser()
        if profiles.exists():
            os.environ.setdefault("PREFECT_PROFILES_PATH", str(profiles))
    os.environ.setdefault("PREFECT_HOME", str(home))
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # The command line itself reports errors; the server's database keeps the rest.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")


@contextmanager
def logging_programs() -> Iterator[None]:
    """Logs on stderr what programs do; Ctrl-C is the normal end of the block."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("virnuc: %(message)s"))
    logger = logging.getLogger("deployments")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Prefect's handler would print the line again
    with suppress(KeyboardInterrupt):
        yield
