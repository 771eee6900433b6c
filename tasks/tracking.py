"""The only door to MLflow: one run in the experiment `virnuc` for each run of a flow.

Tracking never costs anybody a result: when the store cannot be reached or written, a warning says so once and the
run goes on without it.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from virnuc_core.env_config import env

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT: Final = "virnuc"
# A table larger than this is left out of the store: it stays in the run's folder, whose path is a tag.
MAX_ARTIFACT_BYTES: Final = 20_000_000

Value = str | int | float | bool | None

_log = logging.getLogger(__name__)


class TrackedRun:
    """One MLflow run, or nothing at all once the store has failed."""

    def __init__(self, name: str, params: Mapping[str, Value], tags: Mapping[str, str]) -> None:
        self._client: MlflowClient | None = None
        self.run_id: str | None = None
        with self._tolerating_failure():
            from mlflow.entities import Param

            client, experiment_id = _connect()
            run = client.create_run(experiment_id, run_name=name, tags=dict(tags))
            self._client, self.run_id = client, run.info.run_id
            client.log_batch(
                run.info.run_id, params=[Param(key, str(value)) for key, value in params.items()]
            )

    @property
    def links(self) -> dict[str, str]:
        """Where to find this run in MLflow; empty when it is not there."""
        return {"mlflow_run_id": self.run_id} if self._client and self.run_id else {}

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Records figures at one step."""
        with self._tolerating_failure():
            if self._client and self.run_id:
                from mlflow.entities import Metric

                now = int(time.time() * 1000)
                values = [Metric(key, float(value), now, step) for key, value in metrics.items()]
                self._client.log_batch(self.run_id, metrics=values)

    def log_files(self, paths: Sequence[Path]) -> None:
        """Copies files into the store, except those that are too large for it."""
        with self._tolerating_failure():
            for path in paths:
                if not (self._client and self.run_id):
                    return
                if path.stat().st_size <= MAX_ARTIFACT_BYTES:
                    self._client.log_artifact(self.run_id, str(path))
                else:
                    _log.info(
                        "%s is larger than %d bytes and is not copied to MLflow", path, MAX_ARTIFACT_BYTES
                    )

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Ends the run."""
        with self._tolerating_failure():
            if self._client and self.run_id:
                self._client.set_terminated(self.run_id, status)

    @contextmanager
    def _tolerating_failure(self) -> Iterator[None]:
        try:
            yield
        except _store_failures() as error:
            self._client = None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            _log.warning("MLflow cannot be written (%s): the results are whole, but not tracked", reason)


def open_store_early() -> None:
    """Does what takes seconds before a run needs it: imports MLflow, and makes or opens virnuc's own store.

    What goes wrong here goes wrong again when a run is opened, and is told then.
    """
    with suppress(*_store_failures()):
        if env().tracking_uri is None:
            _connect()


@contextmanager
def tracked_run(name: str, params: Mapping[str, Value], tags: Mapping[str, str]) -> Iterator[TrackedRun]:
    """Opens an MLflow run with its settings, and ends it as the block ends.

    Args:
        name: what a person sees in the list of runs.
        params: settings; None is recorded as such.
        tags: where else to find this run.
    """
    run = TrackedRun(name, params, tags)
    try:
        yield run
    except KeyboardInterrupt:
        run.finish("KILLED")
        raise
    except BaseException:
        run.finish("FAILED")
        raise
    run.finish("FINISHED")


def _store_failures() -> tuple[type[Exception], ...]:
    """What using the store can raise when the store, and not virnuc, is at fault."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    # OSError covers the network errors of requests as well as files.
    return MlflowException, SQLAlchemyError, OSError


def _connect() -> tuple["MlflowClient", str]:
    """A client of the configured store, and the id of the experiment there."""
    # Without this MLflow reports each use to its makers, which also delays the end of the process.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A server that is down would otherwise hold up every run for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
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
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is not None:
        return client, experiment.experiment_id
    return client, client.create_experiment(EXPERIMENT, artifact_location=artifacts)
