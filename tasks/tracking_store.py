"""Where MLflow keeps runs: how the store is reached, and what becomes of a run when it is not."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from virnuc_core.env_config import env

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT: Final = "virnuc"
SECONDS_BETWEEN_TRIALS: Final = 60.0
# Runs with figures to compare, and not conversations: MLflow has other pages for those.
_KIND: Final = "custom_model_development"

_log = logging.getLogger(__name__)


class TrackingStore:
    """The experiment in MLflow's store, and how long to leave it alone; shared by a run and the runs in it."""

    def __init__(self) -> None:
        self._connection: tuple[MlflowClient, str] | None = None
        self._rests_until = 0.0
        self._has_warned = False

    @property
    def rests(self) -> bool:
        """Whether it has failed a short while ago."""
        return time.monotonic() < self._rests_until

    @property
    def connection(self) -> tuple["MlflowClient", str]:
        """A client, and the id of the experiment."""
        if self._connection is None:
            self._connection = _connect()
        return self._connection

    @contextmanager
    def tolerating_failure(self) -> Iterator[None]:
        """Turns what is the store's fault into one warning."""
        try:
            yield
        except _store_failures() as error:
            self._rests_until = time.monotonic() + SECONDS_BETWEEN_TRIALS
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            _log.log(
                level,
                "MLflow cannot be written (%s): the results are whole, but its record of them is not",
                reason,
            )


def open_store_early() -> None:
    """Does what takes seconds before a run needs it: imports MLflow, and makes or opens virnuc's own store.

    What goes wrong here goes wrong again when a run is opened, and is told then.
    """
    with suppress(*_store_failures()):
        if env().tracking_uri is None:
            _connect()


def open_store() -> str:
    """Opens the configured store as a run does.

    Returns:
        Why it cannot be opened; empty when it is.
    """
    try:
        _connect()
    except _store_failures() as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _store_failures() -> tuple[type[Exception], ...]:
    """What using the store can raise when the store, and not virnuc, is at fault."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    # OSError covers the network errors of requests as well as files.
    return MlflowException, SQLAlchemyError, OSError


def _connect() -> tuple["MlflowClient", str]:
    """A client of the configured store, and the id of the experiment there."""
    # What MLflow reads when it is used: it reports each use to its makers, which also delays the end of the
    # process; it holds up every run for minutes when a server is down; it prints where a run is.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    if env().tracking_uri:
        return _with_experiment(MlflowClient(env().tracking_uri), artifacts=None)
    home = env().home
    home.mkdir(parents=True, exist_ok=True)
    # Of several first users of a new database all but one fail, so they take turns.
    with open(home / ".mlflow.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        client = MlflowClient(f"sqlite:///{home.resolve() / 'mlflow.db'}")
        return _with_experiment(client, artifacts=(home / "mlartifacts").resolve().as_uri())


def _with_experiment(client: "MlflowClient", artifacts: str | None) -> tuple["MlflowClient", str]:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        try:
            tags = {"mlflow.experimentKind": _KIND}
            return client, client.create_experiment(EXPERIMENT, artifact_location=artifacts, tags=tags)
        except MlflowException:
            # Another first user of this server may have been faster.
            experiment = client.get_experiment_by_name(EXPERIMENT)
            if experiment is None:
                raise
    return client, experiment.experiment_id
