"""The only module that imports MLflow: the experiment `virnuc` in its store, and its model registry."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from virnuc_core.env_config import env
from virnuc_core.errors import CheckpointError, StorageLostError, UsageError
from virnuc_core.plain_text import without_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.models import Model

EXPERIMENT: Final = "virnuc"
RECORD_TAG: Final = "virnuc.record"
CHAMPION: Final = "champion"  # alias of the version that is to be used
# Larger files stay in the run's folder only, whose path is a tag.
MAX_ARTIFACT_BYTES: Final = 20_000_000
# Runs with metrics to compare, and not conversations: MLflow has other pages for those.
_EXPERIMENT_KIND: Final = "custom_model_development"
_MAX_DIGEST_LENGTH: Final = 36  # MLflow's
_ANSWER_WITHIN_S: Final = 5.0
_PAGE_SIZE: Final = 1000
# Answers to what will never be taken, unlike those of a server that is away or of missing credentials.
_REFUSALS: Final = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE", "BAD_REQUEST")

Entry = Mapping[str, Any]
"""Something to record: what it is (`do`), the number of its run in the record (`run`), and values; JSON."""

_log = logging.getLogger(__name__)


class StoreError(Exception):
    """An entry is not written; `is_refusal`: MLflow will never take it."""

    def __init__(self, text: str, *, is_refusal: bool) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class RecordStore(Protocol):
    """Where the entries of a record are written to; see `MlflowStore`."""

    run_ids: dict[int, str]
    open_runs: set[int]
    has_warned: bool

    @property
    def experiment(self) -> str:
        """Id of the experiment."""

    def find_runs(self) -> None:
        """Finds the runs of this record that are there already."""

    def write(self, entry: Entry) -> None:
        """Writes one entry."""


class MlflowStore:
    """Writes entries of one record, a run and its parts, to MLflow; an entry that is written twice is there once.

    Attributes:
        run_ids: MLflow's ids, by the number of the run in the record.
        open_runs: those that have not ended.
        has_warned: a failure has been reported.
    """

    def __init__(self, record: str) -> None:
        self._record = record
        self.run_ids: dict[int, str] = {}
        self.open_runs: set[int] = set()
        self.has_warned = False

    @cached_property
    def connection(self) -> tuple["MlflowClient", str]:
        """A client, and the id of the experiment."""
        return _connect()

    @property
    def experiment(self) -> str:
        """Id of the experiment."""
        return self.connection[1]

    def find_runs(self) -> None:
        """Finds the runs of this record that are there already."""
        for run in _search(*self.connection, f"tags.`{RECORD_TAG}` LIKE '{self._record}/%'"):
            number = int(run.data.tags[RECORD_TAG].rpartition("/")[2])
            self.run_ids[number] = run.info.run_id
            if run.info.status == "RUNNING":
                self.open_runs.add(number)

    def write(self, entry: Entry) -> None:
        """Writes one entry; any exception means that it is not written, LookupError that its run is not open yet."""
        client, experiment = self.connection
        number = entry["run"]
        if entry["do"] != "open":
            self._write_to(client, self.run_ids[number], entry)
            return
        if number in self.run_ids:
            return
        tags = {**entry["tags"], RECORD_TAG: f"{self._record}/{number}"}
        if (parent := entry["parent"]) is not None:
            tags["mlflow.parentRunId"] = self.run_ids[parent]
        run = client.create_run(experiment, int(entry["time"] * 1000), tags, entry["name"])
        self.run_ids[number] = run.info.run_id
        self.open_runs.add(number)

    def _write_to(self, client: "MlflowClient", run_id: str, entry: Entry) -> None:
        from mlflow.entities import Metric, Param

        match entry["do"]:
            case "params":
                client.log_batch(run_id, params=[Param(*param) for param in entry["values"].items()])
            case "points":
                points = [Metric(key, value, int(t * 1000), step) for key, value, step, t in entry["points"]]
                client.log_batch(run_id, points)
            case "inputs":
                _log_inputs(client, run_id, entry["files"])
            case "files":
                for path in map(Path, entry["paths"]):
                    _log_file(client, run_id, path)
            case "text":
                client.log_text(run_id, entry["text"], entry["name"])
            case "figure":
                _log_figure(client, run_id, entry["name"], entry["data"])
            case "note":
                client.set_tag(run_id, "mlflow.note.content", entry["text"])
            case "model":
                _register_model(client, run_id, entry)
            case "end":
                client.set_terminated(run_id, entry["status"], int(entry["time"] * 1000))
                self.open_runs.discard(entry["run"])


def _log_inputs(client: "MlflowClient", run_id: str, files: list[dict[str, str]]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    datasets = [
        Dataset(
            name=file["name"],
            digest=file["sha256"][:_MAX_DIGEST_LENGTH],
            source_type="local",
            source=file["source"],
            profile=file["profile"],
        )
        for file in files
    ]
    context = [InputTag("mlflow.data.context", "input")]
    client.log_inputs(run_id, [DatasetInput(dataset, context) for dataset in datasets])


def _log_file(client: "MlflowClient", run_id: str, path: Path) -> None:
    if not path.exists():
        _log.warning("%s is not there any more: not copied to MLflow", path)
    elif path.stat().st_size > MAX_ARTIFACT_BYTES:
        _log.info("%s has more than %d bytes: not copied to MLflow", path, MAX_ARTIFACT_BYTES)
    else:
        client.log_artifact(run_id, str(path))


def _log_figure(client: "MlflowClient", run_id: str, name: str, data: Mapping[str, Any]) -> None:
    from tasks.pages.plots import RUN_FIGURES

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.png"
        try:
            RUN_FIGURES[name](**data).savefig(path)
        except Exception as error:  # noqa: BLE001 - a figure is not worth a run, whatever is wrong with it
            _log.warning("%s cannot be drawn (%s): it is left out", path.name, error)
        else:
            client.log_artifact(run_id, str(path))


def _register_model(client: "MlflowClient", run_id: str, entry: Entry) -> None:
    from mlflow.exceptions import MlflowException

    name, path = entry["name"], Path(entry["path"])
    client.log_artifact(run_id, str(path), "model")
    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / "MLmodel"
        _model_of(run_id, path.name, entry).save(described)
        client.log_artifact(run_id, str(described), "model")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = list(client.search_model_versions(f"name='{name}' and run_id='{run_id}'"))
    if not found:
        source, text = f"runs:/{run_id}/model", entry["description"]
        found = [client.create_model_version(name, source, run_id, tags=entry["tags"], description=text)]
    if entry["champion"] or CHAMPION not in client.get_registered_model(name).aliases:
        client.set_registered_model_alias(name, CHAMPION, found[0].version)


def _model_of(run_id: str, file: str, entry: Entry) -> "Model":
    """MLflow's description of a head: vectors of its models in, probability of virus out."""
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    signature = ModelSignature(
        Schema([TensorSpec(np.dtype(np.float32), (-1, entry["features"]), "vectors")]),
        Schema([TensorSpec(np.dtype(np.float32), (-1,), "p_virus")]),
    )
    model = Model("model", run_id, signature=signature, metadata=entry["tags"])
    return model.add_flavor("virnuc", data=file)


def find_version(name: str, alias: str | None, version: str | None) -> tuple[str, Mapping[str, str]]:
    """Number and tags of a version of a registered model, by alias or number.

    Raises:
        CheckpointError: there is none.
        StorageLostError: the registry cannot be read.
    """
    with _reading_registry(f"{name}@{alias}" if alias else f"{name}/{version}"):
        client, _ = _connect()
        found = (
            client.get_model_version_by_alias(name, alias)
            if alias
            else client.get_model_version(name, str(version))
        )
        return str(found.version), found.tags


def download_version(name: str, version: str, folder: Path) -> None:
    """Copies the files of a version of a registered model; raises as `find_version`."""
    with _reading_registry(f"{name}/{version}"):
        from mlflow.artifacts import download_artifacts

        client, _ = _connect()
        place = client.get_model_version_download_uri(name, version)
        download_artifacts(place, dst_path=str(folder), tracking_uri=client.tracking_uri)


@contextmanager
def _reading_registry(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # clients of artifact stores raise what their libraries do
        if is_refused(error):
            raise CheckpointError(
                f"there is no head models:/{what} in the MLflow registry ({first_line(error)}): see its page, and "
                "MLFLOW_TRACKING_URI."
            ) from error
        raise StorageLostError(
            f"models:/{what} cannot be read from the MLflow registry ({first_line(error)}): run the same command again."
        ) from error


def store_name() -> str:
    """The store of the present settings, without secrets."""
    return without_secrets(env().tracking_uri or f"SQLite in {env().home.resolve()}")


def is_refused(error: Exception) -> bool:
    """Whether MLflow will never take what it was given."""
    if isinstance(error, StoreError):
        return error.is_refusal
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


def find_runs(condition: str) -> Iterator[tuple[Mapping[str, str], Mapping[str, float]]]:
    """Tags and metrics of the runs that fulfil a condition in MLflow's filter language.

    Raises:
        UsageError: the store cannot be read.
    """
    try:
        for run in _search(*_connect(), condition):
            yield run.data.tags, run.data.metrics
    except _store_failures() as error:
        raise UsageError(
            f"MLflow's record of the runs cannot be read ({first_line(error)}): see to it that MLFLOW_TRACKING_URI, or "
            "VIRNUC_HOME without it, is that of the runs."
        ) from error


def _search(client: "MlflowClient", experiment: str, condition: str) -> Iterator["Run"]:
    token = None
    while True:
        page = client.search_runs([experiment], condition, max_results=_PAGE_SIZE, page_token=token)
        yield from page
        if (token := page.token) is None:
            return


def open_store_early() -> None:
    """Warms up before a run: imports MLflow, and creates or opens virnuc's own store.

    Errors are ignored here; they recur and are reported when a run is opened.
    """
    with suppress(*_store_failures()):
        if env().tracking_uri is None:
            _connect()


def check_store() -> str:
    """Opens the configured store as a run does; returns why it cannot be used, "" when it can."""
    import httpx

    uri = env().tracking_uri
    try:
        if uri is None:
            env().home.mkdir(parents=True, exist_ok=True)
            # SQLite creates files beside its database.
            with tempfile.TemporaryFile(dir=env().home):
                pass
        elif uri.startswith(("http://", "https://")):
            # MLflow's client would retry.
            httpx.get(f"{uri.rstrip('/')}/health", timeout=_ANSWER_WITHIN_S).raise_for_status()
        _connect()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return without_secrets(str(error))
    except _store_failures() as error:
        return (isinstance(error, OSError) and error.strerror) or first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """An error of MLflow's, without secrets."""
    return without_secrets((str(error).splitlines() or [type(error).__name__])[0])


def _store_failures() -> tuple[type[Exception], ...]:
    """Exceptions that mean that the store, not virnuc, is at fault."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    # OSError covers the network errors of requests as well as files.
    return MlflowException, SQLAlchemyError, OSError


def _connect() -> tuple["MlflowClient", str]:
    # Read by MLflow on use. They prevent telemetry, which also delays process exit; minutes of waiting when a server is
    # down, since what it does not take is kept for later; progress bars, and the address of each run on stdout.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    # virnuc says itself what fails. Their lines can hold the address of the store, and with it a password.
    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
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
