"""The only module that imports MLflow: one run per flow run in the experiment `virnuc`, with one child run per lane.

Tracking is best effort: when the store fails, one warning is logged, the run continues, and a circuit breaker pauses
further requests for a while.
"""

import fcntl
import getpass
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self
from urllib.parse import urlsplit

import httpx

from virnuc_core import __version__
from virnuc_core.env_config import env
from virnuc_core.errors import UsageError
from virnuc_core.remote import is_url
from virnuc_core.specs import InputFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

EXPERIMENT: Final = "virnuc"
SECONDS_BETWEEN_TRIALS: Final = 60.0
# Larger files stay in the run's folder only, whose path is a tag.
MAX_ARTIFACT_BYTES: Final = 20_000_000
# Runs with metrics to compare, and not conversations: MLflow has other pages for those.
_EXPERIMENT_KIND: Final = "custom_model_development"
_MAX_DIGEST_LENGTH: Final = 36  # MLflow's
_ANSWER_WITHIN_S: Final = 5.0

Value = str | int | float | bool | None
Status = Literal["FINISHED", "FAILED", "KILLED"]

_log = logging.getLogger(__name__)


class MetricPoint(NamedTuple):
    """A metric at one moment; `time` in Unix seconds."""

    key: str
    value: float
    step: int
    time: float


class TrackingStore:
    """The experiment in MLflow's store, with a circuit breaker; shared by a run and its child runs."""

    def __init__(self) -> None:
        self._open_until = 0.0
        self._has_warned = False

    @cached_property
    def connection(self) -> tuple["MlflowClient", str]:
        """A client, and the id of the experiment."""
        return _connect()

    def attempt(self, write: Callable[["MlflowClient", str], object], *, even_if_open: bool = False) -> None:
        """Calls `write` with the connection; a failure of the store is one warning, and opens the circuit."""
        if time.monotonic() < self._open_until and not even_if_open:
            return
        try:
            write(*self.connection)
        except _store_failures() as error:
            self._open_until = time.monotonic() + SECONDS_BETWEEN_TRIALS
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            _log.log(
                level,
                "MLflow cannot be written (%s): the results are whole, but its record of them is not",
                _first_line(error),
            )


class TrackedRun:
    """One MLflow run; `run_id` is None where the store failed when it was opened."""

    def __init__(self, store: TrackingStore, run_id: str | None) -> None:
        self._store = store
        self.run_id = run_id

    @classmethod
    def open(
        cls,
        store: TrackingStore,
        name: str,
        params: Mapping[str, Value],
        tags: Mapping[str, str],
        start_time: float | None = None,
    ) -> Self:
        """Starts a run; `start_time` in Unix seconds, now by default."""
        run = cls(store, None)

        def create(client: "MlflowClient", experiment_id: str) -> None:
            started, labels = int((start_time or time.time()) * 1000), {**_user_and_source(), **tags}
            run.run_id = client.create_run(experiment_id, started, labels, name).info.run_id

        store.attempt(create)
        run.log_params(params)
        return run

    def child(
        self, name: str, params: Mapping[str, Value], tags: Mapping[str, str], start_time: float | None = None
    ) -> "TrackedRun":
        """Starts a child run; `start_time` in Unix seconds."""
        if self.run_id is None:
            return TrackedRun(self._store, None)
        tags = {**tags, "mlflow.parentRunId": self.run_id}
        return TrackedRun.open(self._store, name, params, tags, start_time)

    @property
    def links(self) -> dict[str, str]:
        """This run's MLflow id and, with a server, its page; empty without a run."""
        if self.run_id is None:
            return {}
        links = {"mlflow_run_id": self.run_id}
        server = urlsplit(env().tracking_uri or "")
        if server.scheme in ("http", "https"):
            # Links are public, and an address may hold a password.
            address = f"{server.scheme}://{server.netloc.rpartition('@')[2]}{server.path.rstrip('/')}"
            links["mlflow_run_url"] = (
                f"{address}/#/experiments/{self._store.connection[1]}/runs/{self.run_id}"
            )
        return links

    def log_params(self, params: Mapping[str, Value]) -> None:
        """Records settings; MLflow accepts each once."""

        def write(client: "MlflowClient", run_id: str) -> None:
            from mlflow.entities import Param

            client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])

        self._try(write)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0, at: float | None = None) -> None:
        """Records metrics at one step; `at` in Unix seconds, now by default."""
        moment = at or time.time()
        self.log_points([MetricPoint(key, value, step, moment) for key, value in metrics.items()])

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Records metrics of several moments in as few requests as possible."""

        def write(client: "MlflowClient", run_id: str) -> None:
            from mlflow.entities import Metric

            client.log_batch(
                run_id, [Metric(p.key, float(p.value), int(p.time * 1000), p.step) for p in points]
            )

        self._try(write)

    def log_inputs(self, files: Sequence[InputFile], paths: Sequence[str]) -> None:
        """Records input files as datasets, identified by their content."""

        def write(client: "MlflowClient", run_id: str) -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            datasets = [
                Dataset(
                    name=file.name,
                    digest=file.sha256[:_MAX_DIGEST_LENGTH],
                    source_type="local",
                    source=json.dumps({"uri": path if is_url(path) else str(Path(path).resolve())}),
                    profile=json.dumps({"bytes": file.size, "sha256": file.sha256}),
                )
                for file, path in zip(files, paths, strict=False)
            ]
            context = [InputTag("mlflow.data.context", "input")]
            client.log_inputs(run_id, [DatasetInput(dataset, context) for dataset in datasets])

        self._try(write)

    def log_files(self, paths: Sequence[Path]) -> None:
        """Copies files into the store, except those above its size limit."""

        def write(client: "MlflowClient", run_id: str) -> None:
            for path in paths:
                if path.stat().st_size <= MAX_ARTIFACT_BYTES:
                    client.log_artifact(run_id, str(path))
                else:
                    _log.info("%s has more than %d bytes: not copied to MLflow", path, MAX_ARTIFACT_BYTES)

        self._try(write)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Value]]) -> None:
        """Records `NAME.tsv`; missing values are empty."""
        columns = list(dict.fromkeys(chain.from_iterable(rows)))
        lines = [columns, *([_tsv_cell(row.get(column)) for column in columns] for row in rows)]
        text = "".join("\t".join(line) + "\n" for line in lines)
        self._try(lambda client, run_id: client.log_text(run_id, text, f"{name}.tsv"))

    def log_figure(self, name: str, figure: "Figure") -> None:
        """Records `NAME.png`."""
        self._try(lambda client, run_id: client.log_figure(run_id, figure, f"{name}.png"))

    def register_model(self, name: str, path: Path, tags: Mapping[str, str], description: str) -> None:
        """Registers a file as the next version of a model; tags and description (Markdown) are the version's."""

        def write(client: "MlflowClient", run_id: str) -> None:
            from mlflow.exceptions import MlflowException

            client.log_artifact(run_id, str(path), "model")
            try:
                client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            client.create_model_version(
                name, f"runs:/{run_id}/model", run_id, tags=dict(tags), description=description
            )

        self._try(write)

    def describe(self, markdown: str) -> None:
        """Sets the text on the run's page."""
        self._try(lambda client, run_id: client.set_tag(run_id, "mlflow.note.content", markdown))

    def finish(self, status: Status, at: float | None = None) -> None:
        """Ends the run; `at` in Unix seconds, now by default."""
        ended = int((at or time.time()) * 1000)
        # A run that is never ended looks alive forever.
        self._try(lambda client, run_id: client.set_terminated(run_id, status, ended), even_if_open=True)

    def _try(self, write: Callable[["MlflowClient", str], object], *, even_if_open: bool = False) -> None:
        if (run_id := self.run_id) is not None:
            self._store.attempt(lambda client, _: write(client, run_id), even_if_open=even_if_open)


# The parent of new runs; a subflow inherits it with the context.
_enclosing: ContextVar[TrackedRun | None] = ContextVar("enclosing", default=None)


def current_run() -> TrackedRun:
    """The run of the enclosing `tracked_run`, or one that records nothing."""
    return _enclosing.get() or TrackedRun(TrackingStore(), None)


@contextmanager
def tracked_run(name: str, params: Mapping[str, Value], tags: Mapping[str, str]) -> Iterator[TrackedRun]:
    """Opens an MLflow run for the block, as a child inside another one."""
    outer = _enclosing.get()
    if outer is not None and outer.run_id is not None:
        run = outer.child(name, params, tags)
    else:
        run = TrackedRun.open(TrackingStore(), name, params, tags)
    token = _enclosing.set(run)
    status: Status = "KILLED"  # Ctrl-C, or Prefect's stop signal
    try:
        yield run
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        run.finish(status)
        _enclosing.reset(token)


def find_runs(condition: str) -> Iterator[tuple[Mapping[str, str], Mapping[str, float]]]:
    """Tags and metrics of the runs that fulfil a condition in MLflow's filter language.

    Raises:
        UsageError: the store cannot be read.
    """
    try:
        client, experiment_id = _connect()
        token = None
        while True:
            page = client.search_runs([experiment_id], condition, max_results=1000, page_token=token)
            for run in page:
                yield run.data.tags, run.data.metrics
            if (token := page.token) is None:
                return
    except _store_failures() as error:
        raise UsageError(
            f"MLflow's record of the runs cannot be read ({_first_line(error)}): see to it that MLFLOW_TRACKING_URI, or "
            "VIRNUC_HOME without it, is that of the runs."
        ) from error


def open_store_early() -> None:
    """Warms up before a run: imports MLflow, and creates or opens virnuc's own store.

    Errors are ignored here; they recur and are reported when a run is opened.
    """
    with suppress(*_store_failures()):
        if env().tracking_uri is None:
            _connect()


def check_store() -> str:
    """Opens the configured store as a run does; returns why it cannot be used, "" when it can."""
    uri = env().tracking_uri
    try:
        if uri is None:
            env().home.mkdir(parents=True, exist_ok=True)
            # SQLite creates files beside its database.
            with tempfile.TemporaryFile(dir=env().home):
                pass
        elif uri.startswith(("http://", "https://")):
            # MLflow's client would retry for minutes.
            httpx.get(f"{uri.rstrip('/')}/health", timeout=_ANSWER_WITHIN_S).raise_for_status()
        _connect()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error)
    except _store_failures() as error:
        return (isinstance(error, OSError) and error.strerror) or _first_line(error)
    return ""


def _store_failures() -> tuple[type[Exception], ...]:
    """Exceptions that mean that the store, not virnuc, is at fault."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    # OSError covers the network errors of requests as well as files.
    return MlflowException, SQLAlchemyError, OSError


def _connect() -> tuple["MlflowClient", str]:
    # Read by MLflow on use. They prevent telemetry, which also delays process exit; minutes of
    # waiting per run when a server is down; and the address of each run on stdout.
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
    # Concurrent creation of a new database fails for all but one process.
    with open(home / ".mlflow.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        client = MlflowClient(f"sqlite:///{home.resolve() / 'mlflow.db'}")
        return _with_experiment(client, artifacts=(home / "mlartifacts").resolve().as_uri())


def _with_experiment(client: "MlflowClient", artifacts: str | None) -> tuple["MlflowClient", str]:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        try:
            tags = {"mlflow.experimentKind": _EXPERIMENT_KIND}
            return client, client.create_experiment(EXPERIMENT, artifact_location=artifacts, tags=tags)
        except MlflowException:
            # Another process may have created it meanwhile.
            experiment = client.get_experiment_by_name(EXPERIMENT)
            if experiment is None:
                raise
    return client, experiment.experiment_id


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tsv_cell(value: Value) -> str:
    return "" if value is None else " ".join(str(value).split())


def _user_and_source() -> dict[str, str]:
    """The columns "User" and "Source" of MLflow's list of runs."""
    user = {}
    with suppress(KeyError, OSError):  # a container's user id may have no name
        user["mlflow.user"] = getpass.getuser()
    return {**user, "mlflow.source.name": f"virnuc {__version__}", "mlflow.source.type": "LOCAL"}
