"""MLflow runs, one per run, in the experiment `virnuc`; the only module that imports MLflow.

An MLflow run is written from a finished run's run.json, and found again by the id in it: what is missing is added, and
nothing is there twice. MLflow never fails a run: while it is away, `virnuc server track RUN` can write it later.
"""

import fcntl
import getpass
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from itertools import chain
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from tasks.artifacts import show_link
from tasks.run_entries import Entry, Row
from virnuc_core import __version__
from virnuc_core.env_config import env, home_folder
from virnuc_core.errors import StorageLostError, VirnucError
from virnuc_core.files import make_private, open_lock
from virnuc_core.plain_text import without_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT: Final = "virnuc"
_RUN_TAG: Final = "virnuc.run"
_FLOW_RUN_TAG: Final = "prefect.flow_run_id"

Status = Literal["FAILED", "KILLED"]

_log = logging.getLogger(__name__)
_connecting: Final = Lock()


@contextmanager
def _raising_storage_lost() -> Iterator[None]:
    """Translates what MLflow's clients raise, which is what their libraries do."""
    try:
        yield
    except VirnucError:
        raise
    except Exception as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise StorageLostError(f"MLflow cannot be written ({reason.splitlines()[0]})") from error


def start_tracking(run_id: str, tags: Mapping[str, str]) -> None:
    """With the tags of a flow run, opens its MLflow run; otherwise only loads MLflow, which takes seconds, in a thread."""
    if env().tracking == "off":
        return
    if _FLOW_RUN_TAG not in tags:
        Thread(target=copy_context().run, args=(_load_mlflow,), name="mlflow", daemon=True).start()
        return
    try:
        client, experiment = connect()
        with _raising_storage_lost():
            # Of an attempt whose process was killed.
            _end_runs(client, experiment, tags[_FLOW_RUN_TAG], "KILLED")
            labels = {**_own_tags(), **tags, _RUN_TAG: run_id}
            run = client.create_run(experiment, tags=labels, run_name=tags["prefect.flow_run_name"])
    except VirnucError as error:
        _log.warning("%s: the run is logged when it has finished", error)
        return
    if page := _page_of(run):
        show_link("virnuc-mlflow", page, "This run in MLflow")


def track(make_entry: Callable[[], Entry], out: str | Path) -> None:
    """Writes an entry if it can be written; otherwise a warning names `virnuc server track OUT`."""
    if env().tracking == "off":
        return
    try:
        write(*connect(), make_entry())
    except VirnucError as error:
        _log.warning(
            "%s: the results are complete; log the run later with `virnuc server track %s`", error, out
        )


def end_runs(flow_run_id: str, status: Status) -> None:
    """Ends the open MLflow runs of a flow run, if there are any and the store can be written."""
    if env().tracking == "off":
        return
    try:
        with _raising_storage_lost():
            _end_runs(*connect(), flow_run_id, status)
    except VirnucError as error:
        _log.warning("%s: it still shows the run as running", error)


def write(client: "MlflowClient", experiment: str, entry: Entry) -> None:
    """Writes an entry, or adds what is missing of it; raises as `connect`."""
    with _raising_storage_lost():
        _write(client, experiment, entry)


def _write(client: "MlflowClient", experiment: str, entry: Entry) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    found = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{entry.id}'", max_results=1)
    tags = {**_own_tags(), **entry.tags, _RUN_TAG: entry.id, "mlflow.note.content": entry.note}
    begin, end = int(entry.started * 1000), int(entry.finished * 1000)
    run = found[0] if found else client.create_run(experiment, begin, tags, entry.name)
    run_id = run.info.run_id
    params = {name: str(value)[:500] for name, value in entry.params.items() if value not in (None, "")}
    client.log_batch(
        run_id,
        metrics=[Metric(name, value, end, step) for name, value, step in entry.metrics],
        params=[Param(*param) for param in params.items()],
        tags=[RunTag(*tag) for tag in tags.items()] if found else [],
    )
    context = [InputTag("mlflow.data.context", "input")]
    datasets = [
        Dataset(
            name=file["name"],
            digest=file["sha256"][:36],  # no more fits into its database
            source_type="local",
            source=json.dumps({"uri": file["name"]}),
            profile=json.dumps({"bytes": file["size"], "sha256": file["sha256"]}),
        )
        for file in entry.inputs
    ]
    client.log_inputs(run_id, [DatasetInput(dataset, context) for dataset in datasets])
    for path in entry.files:
        if path.stat().st_size <= 20_000_000:  # larger ones stay in the run's folder, whose path is a tag
            client.log_artifact(run_id, str(path))
    for name, rows in (entry.tables or {}).items():
        client.log_text(run_id, _tsv(rows), f"{name}.tsv")
    client.set_terminated(run_id, "FINISHED", end)


def _tsv(rows: Sequence[Row]) -> str:
    """A table with a header; missing values are empty."""
    columns = list(dict.fromkeys(chain.from_iterable(rows)))
    cells = ([" ".join(str(row.get(column, "")).split()) for column in columns] for row in rows)
    return "".join("\t".join(line) + "\n" for line in [columns, *cells])


def _own_tags() -> dict[str, str]:
    """The columns "User" and "Source" of MLflow's list of runs."""
    user = {}
    with suppress(KeyError, OSError):  # a container's user id may have no name
        user["mlflow.user"] = getpass.getuser()
    return {**user, "mlflow.source.name": f"virnuc {__version__}", "mlflow.source.type": "LOCAL"}


def _page_of(run: "Run") -> str:
    """A run's page on the MLflow server, if there is one."""
    server = urlsplit(env().tracking_uri or "")
    if server.scheme not in ("http", "https"):
        return ""
    address = without_secrets(f"{server.scheme}://{server.netloc}{server.path.rstrip('/')}")
    return f"{address}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"


def _end_runs(client: "MlflowClient", experiment: str, flow_run_id: str, status: Status) -> None:
    is_open = f"tags.`{_FLOW_RUN_TAG}` = '{flow_run_id}' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment], is_open):
        client.set_terminated(run.info.run_id, status)


def connect() -> "tuple[MlflowClient, str]":
    """A client, and the id of the experiment.

    Raises:
        StorageLostError: the store cannot be used, or its server does not answer within 5 s.
        UsageError: there is no folder for it.
    """
    # Read by MLflow on use. They prevent telemetry, which also delays process exit; waiting for a server that is down;
    # progress bars, and the address of each run on stdout.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # Of two threads that import it at once, one may see a part of it.
    with _connecting, _raising_storage_lost():
        from mlflow import MlflowClient

        # virnuc says itself what fails. Their lines can hold the address of the store, and with it a password.
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if env().tracking_uri:
            return _with_experiment(MlflowClient(env().tracking_uri), artifacts=None)
        home = home_folder()
        # Concurrent creation of a new database fails for all but one process.
        with open_lock(home / ".mlflow.lock") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            make_private(home / "mlflow.db")
            client = MlflowClient(f"sqlite:///{home.resolve() / 'mlflow.db'}")
            return _with_experiment(client, artifacts=(home / "mlartifacts").resolve().as_uri())


def _load_mlflow() -> None:
    with suppress(VirnucError):
        connect()


def _with_experiment(client: "MlflowClient", artifacts: str | None) -> "tuple[MlflowClient, str]":
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        try:
            # Runs with metrics to compare, and not conversations: MLflow has other pages for those.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            return client, client.create_experiment(EXPERIMENT, artifact_location=artifacts, tags=tags)
        except MlflowException:
            # Another process may have created it meanwhile.
            experiment = client.get_experiment_by_name(EXPERIMENT)
            if experiment is None:
                raise
    return client, experiment.experiment_id
