"""Whether a run from the command line is a flow, and Prefect for it: a temporary server, with no output on the terminal."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from virnuc_core.env_config import env, home_folder, value_of
from virnuc_core.errors import UsageError, VirnucError
from virnuc_core.files import make_private
from virnuc_core.host_memory import without_collection
from virnuc_core.plain_text import hide_secrets_in_logs
from virnuc_core.versions import log_version_warnings

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

_log = logging.getLogger(__name__)

# In the present folder; Prefect reads them, too.
_OWN_FILE = "prefect.toml"
_SETTINGS_FILES = (_OWN_FILE, ".env", "pyproject.toml")
# The server's first start on a slow or busy machine can take longer than Prefect's 20 s.
_SERVER_SECONDS = 120


def prepare_local_prefect() -> None:
    """Sets the variables that Prefect reads on first import; the user's own take precedence.

    A temporary server keeps its runs in a database in PREFECT_HOME. Sharing `~/.prefect` with other projects would let a
    Prefect of another version migrate that database, after which neither can read it. A server in the user's profile is
    still used.

    Raises:
        UsageError: the home folder is not writable.
    """
    hide_secrets_in_logs()
    log_version_warnings("orchestration")
    home = home_folder("prefect").resolve()
    if env().prefect_home is None:
        _make_folder(home)
        make_private(home / "prefect.db")
        profiles = Path("~/.prefect/profiles.toml").expanduser()
        if profiles.exists():
            os.environ.setdefault("PREFECT_PROFILES_PATH", str(profiles))
    defaults = {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(_SERVER_SECONDS),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # As in prefect.yaml: a lasting server takes a run without heartbeats for dead.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "virnuc_core,tasks,flows",
        # Prefect would warn about every line that is logged outside a run.
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        # The command line itself reports errors; the server's database keeps the rest.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def has_server() -> bool:
    """Whether a Prefect server is configured: by PREFECT_API_URL, or in a settings file or profile of Prefect.

    Prefect takes seconds to import, and is asked only if such a file could name one.

    Raises:
        UsageError: the home folder is not writable.
    """
    if value_of("PREFECT_API_URL"):
        return True
    homes = [env().prefect_home or env().home / "prefect", Path("~/.prefect").expanduser()]
    profiles = value_of("PREFECT_PROFILES_PATH")
    files = [*_SETTINGS_FILES, *([profiles] if profiles else [Path(home, "profiles.toml") for home in homes])]
    if "prefect" not in sys.modules and not any(_names_server(Path(file)) for file in files):
        return False
    prepare_local_prefect()
    from prefect.settings import PREFECT_API_URL

    return bool(PREFECT_API_URL.value())


def _names_server(path: Path) -> bool:
    """Whether a settings file may name a server; says yes rather than no."""
    try:
        text = path.read_text(errors="replace").lower()
    except OSError:
        return False
    is_of_prefect = path.name == _OWN_FILE or ("prefect" in text and "api" in text)
    return is_of_prefect and "url" in text


@contextmanager
def without_prefect(body: str) -> Iterator[Callable[..., Any]]:
    """Makes ready for a run in this process, with MLflow beside it; gives the function named `body`, as MODULE:NAME."""
    from tasks.artifacts import log_from_info
    from tasks.mlflow_process import mlflow_beside

    if shutil.which("nvidia-smi"):
        from virnuc_core.inference.launcher import prepare_for_gpus

        prepare_for_gpus()  # before the imports, which take seconds, so that Triton hashes itself meanwhile
    hide_secrets_in_logs()
    log_version_warnings("orchestration")
    log_from_info()
    _log.info("the run is in this process: no Prefect server is configured")
    # Read by torch's OpenMP when it is loaded. Where other programs compute, threads that wait for each other by spinning for
    # milliseconds, its default, take several times as long.
    if value_of("OMP_WAIT_POLICY") is None:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with mlflow_beside():
        with without_collection():
            function = resolve_name(body)
        yield function


@contextmanager
def local_prefect(*, lasting: bool = False) -> Iterator[None]:
    """Makes Prefect ready for the block: the server of the user's settings, or else a temporary one.

    Args:
        lasting: the run leaves work to others, so a temporary server will not do.

    Raises:
        UsageError: virnuc's home folder is not writable, or a permanent server is needed and none is configured.
        VirnucError: the temporary server does not start.
    """
    prepare_local_prefect()
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    if lasting:
        from flows.pool import require_lasting_server

        require_lasting_server()
    if PREFECT_API_URL.value():
        yield
        return
    # Prefect's modules warn or fail when two threads import them at once, so this is not left to get_client.
    from prefect.client.orchestration import get_client
    from prefect.server.api.server import SubprocessASGIServer

    # A temporary server needs no heartbeat, whose end
    # takes a second for each flow and lane.
    no_heartbeat = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with no_heartbeat, ThreadPoolExecutor(1, initializer=_block_interrupts) as background:
        start = background.submit(get_client, sync_client=True)
        with _ending_with_this_process(start, SubprocessASGIServer()):
            _import_what_runs_need()
            try:
                start.result()
            except RuntimeError as error:
                raise VirnucError(f"Prefect's temporary server does not start: {error}") from error
            yield


@contextmanager
def _ending_with_this_process(start: Future[Any], server: "SubprocessASGIServer") -> Iterator[None]:
    """Ends the server even when this process is killed in the block.

    A shell waits on a pipe that is never written to and closes when this process ends, however it ends.
    """
    while server.server_process is None and not start.done():
        time.sleep(0.01)
    if server.server_process is None:  # it has failed; `start` has the error
        yield
        return
    command = ["/bin/sh", "-c", 'read -r _; kill "$1"', "sh", str(server.server_process.pid)]
    # In its own session: only this process handles Ctrl-C and hang-ups.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watch:
        try:
            yield
        finally:
            watch.kill()


def _block_interrupts() -> None:
    """Shields the server, which inherits the signal mask, from Ctrl-C: a stopping run still reports to it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _import_what_runs_need() -> None:
    """Takes about as long as the server's start, on another core."""
    import flows.embed
    import flows.predict  # noqa: F401
    from tasks.mlflow_store import open_store_early

    open_store_early()


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"virnuc's home folder {path.parent} cannot be written ({error.strerror}): set VIRNUC_HOME to one that can."
        ) from error


@contextmanager
def logging_programs() -> Iterator[None]:
    """Logs on stderr which programs start and end; Ctrl-C is the normal end of the block."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("virnuc: %(message)s"))
    logger = logging.getLogger("deployments")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Prefect's handler would print the line again
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
