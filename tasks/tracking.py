"""MLflow runs, one per run, in the experiment `virnuc`; the only module that imports MLflow.

An MLflow run is written from a finished run's run.json, and found again by the id in it: what is missing is added, and
nothing is there twice. Values are read from the run's folder, and files of fixed names in it are copied; nothing there says
which other files to read. MLflow never fails a run: while it is away, `virnuc track RUN` can write it later.
"""

import fcntl
import getpass
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from tasks.artifacts import show_link
from virnuc_core import __version__
from virnuc_core.env_config import env, home_folder
from virnuc_core.errors import DamagedFileError, StorageLostError, VirnucError
from virnuc_core.files import make_private, open_lock, parse_object
from virnuc_core.plain_text import without_secrets
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT: Final = "virnuc"
EVALUATION: Final = "evaluation.json"
EVALUATED_RUN: Final = "run"  # folder of the predict run that is evaluated
# Larger files stay in the run's folder only, whose path is a tag.
MAX_ARTIFACT_BYTES: Final = 20_000_000
_RUN_TAG: Final = "virnuc.run"
_FLOW_RUN_TAG: Final = "prefect.flow_run_id"
_SECONDS_TO_CONNECT: Final = 10.0
_MAX_DIGEST_LENGTH: Final = 36  # MLflow's
_MAX_PARAM_LENGTH: Final = 500
_ID: Final = re.compile(r"[0-9a-f-]{8,64}")
_PARAMS: Final = (
    *("kind", "input_digest", "plan_fingerprint", "chunk_length", "min_length", "frames", "threshold", "fdr"),
    *("embeddings", "virnuc_version"),
)
_MODEL_PARAMS: Final = (
    *(
        "weights_fingerprint",
        "repr_layer",
        "precision",
        "engine",
        "attention",
        "compile_mode",
        "token_budget",
    ),
)
_RUN_FILES: Final = (
    "predictions.tsv",
    "contigs.tsv",
    "regions.tsv",
    "rejected.tsv",
    "report.html",
    "run.json",
)
_PLOTS: Final = ("roc.png", "reliability.png")
_TRAINING_FILES: Final = tuple(f"training/{name}" for name in ("records.tsv", "figures.json", *_PLOTS))

Value = str | int | float | bool | None
Row = Mapping[str, Value]
Status = Literal["FAILED", "KILLED"]
Point = tuple[str, float, int]
"""A metric, its value and its step."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What MLflow gets of one run.

    Attributes:
        id: by which its MLflow run is found again.
        started: Unix time, as `finished`.
        inputs: name, size and SHA-256 of each input file.
        note: text on its page.
        files: to be copied; those that are not there, and links, are left out.
        tables: rows by name.
        figures_of: run folder whose figures are drawn.
    """

    id: str
    name: str
    started: float
    finished: float
    params: Mapping[str, Value]
    metrics: Sequence[Point]
    tags: Mapping[str, str]
    inputs: Sequence[Mapping[str, Any]] = ()
    note: str = ""
    files: Sequence[Path] = ()
    tables: Mapping[str, Sequence[Row]] | None = None
    figures_of: Path | None = None


class Store:
    """MLflow's store, connected to in a thread: the import alone takes seconds, and a server may not answer."""

    def __init__(self, on_connected: "Callable[[MlflowClient, str], None] | None" = None) -> None:
        self._connection: Future[tuple[MlflowClient, str]] = Future()
        context = copy_context()
        Thread(target=context.run, args=(self._connect, on_connected), name="mlflow", daemon=True).start()

    def _connect(self, on_connected: "Callable[[MlflowClient, str], None] | None") -> None:
        try:
            client, experiment = _connect()
            if on_connected is not None:
                on_connected(client, experiment)
            self._connection.set_result((client, experiment))
        except BaseException as error:  # noqa: BLE001 (raised by `connection`)
            self._connection.set_exception(error)

    @property
    def has_failed(self) -> bool:
        """Whether it is known that it cannot be connected to."""
        return self._connection.done() and self._connection.exception() is not None

    def connection(self) -> "tuple[MlflowClient, str]":
        """A client, and the id of the experiment; raises what MLflow's client does, or StorageLostError."""
        try:
            return self._connection.result(_SECONDS_TO_CONNECT)
        except TimeoutError as error:
            raise StorageLostError(f"it does not answer within {_SECONDS_TO_CONNECT:.0f} s") from error

    def wait(self) -> None:
        """Waits until it is connected, or fails to."""
        with suppress(Exception):
            self.connection()

    def write(self, entry: Entry) -> None:
        """Writes an entry, or adds what is missing of it.

        Raises:
            StorageLostError: the store cannot be written.
        """
        try:
            _write(*self.connection(), entry)
        except Exception as error:  # clients of stores raise what their libraries do
            raise StorageLostError(f"MLflow cannot be written ({_first_line(error)})") from error


def start_tracking(run_id: str = "", tags: Mapping[str, str] = MappingProxyType({})) -> Store | None:
    """Connects to the store; with the tags of a flow run, opens its MLflow run. None if VIRNUC_TRACKING is off."""
    if env().tracking == "off":
        return None
    if _FLOW_RUN_TAG not in tags:
        return Store()
    name = tags["prefect.flow_run_name"]

    def open_run(client: "MlflowClient", experiment: str) -> None:
        _end_runs(client, experiment, tags[_FLOW_RUN_TAG], "KILLED")  # of an attempt whose process was killed
        run = client.create_run(experiment, tags={**_own_tags(), **tags, _RUN_TAG: run_id}, run_name=name)
        if page := _page_of(run):
            show_link("virnuc-mlflow", page, "This run in MLflow")

    return Store(open_run)


def track(store: Store | None, make_entry: Callable[[], Entry], out: str | Path) -> None:
    """Writes an entry if it can be written; otherwise a warning names `virnuc track OUT`."""
    if store is None:
        return
    try:
        (Store() if store.has_failed else store).write(make_entry())
    except VirnucError as error:
        _log.warning("%s: the results are complete, and `virnuc track %s` logs the run later", error, out)


def end_runs(flow_run_id: str, status: Status) -> None:
    """Ends the open MLflow runs of a flow run, if there are any and the store can be written."""
    if env().tracking == "off":
        return
    try:
        _end_runs(*Store().connection(), flow_run_id, status)
    except Exception as error:  # noqa: BLE001 - clients of stores raise what their libraries do
        _log.warning("MLflow cannot be written (%s): it shows the run as running", _first_line(error))


def entries_of(out: Path) -> list[Entry]:
    """Of the finished runs in a folder, or in that beside a file; in this order they are written.

    Raises:
        DamagedFileError: a run.json is not one.
    """
    folders = [folder for folder in (out, Path(f"{out}{EMBED_SUFFIX}")) if RunFolder(folder).report.is_file()]
    entries = [run_entry(folder) for folder in folders]
    if (out / EVALUATION).is_file():
        entries += [run_entry(out / EVALUATED_RUN), evaluation_entry(out)]
    return entries


def run_entry(root: Path) -> Entry:
    """Of the finished run in a folder; with files and figures if it was a flow.

    Raises:
        DamagedFileError: its run.json cannot be read, or is none.
    """
    report = RunFolder(root).report
    document = _read(report)
    try:
        entry = _entry_of(root, document)
        if document["kind"] == "train":
            entry = _with_training(entry, root, document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(
            f"{report} is no record of a finished run ({error!r}): run the same command again."
        ) from error
    return entry


def evaluation_entry(root: Path) -> Entry:
    """Of the evaluation in a folder; raises as `run_entry`."""
    report = root / EVALUATION
    run, document = run_entry(root / EVALUATED_RUN), _read(report)
    try:
        levels = {level: document[level] for level in ("chunks", "contigs")}
        metrics = _level_metrics(levels, "")
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            f"{report} is no record of an evaluation ({error!r}): run the same command again."
        ) from error
    names = (EVALUATION, "evaluation.md", *_PLOTS)
    return replace(
        run,
        id=f"{run.id}-e",
        name=f"evaluate{run.name.removeprefix('predict')}",
        params={**run.params, "kind": "evaluate"},
        metrics=metrics,
        tags={**run.tags, "virnuc.out": str(root.resolve())},
        note=f"Evaluation: {root.resolve()}",
        files=_own_files(root, names) if run.files else (),
        tables=None,
        figures_of=None,
    )


def _entry_of(root: Path, document: Mapping[str, Any]) -> Entry:
    is_flow = document["run_as"] == "flow"
    run_id, lanes = document["id"], document["lanes"]
    if not _ID.fullmatch(run_id):
        raise ValueError("id")
    names = [file["name"] for file in document["inputs"]]
    links = {name.replace("_", ".", 1): text for name, text in document["links"].items()}
    labels = {f"virnuc.{name}": text for name, text in document["labels"].items() if text}
    prefect = {name: text for name, text in links.items() if name.startswith("prefect.")}
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Entry(
        id=run_id,
        name=prefect.get("prefect.flow_run_name") or f"{document['kind']} {names[0] if names else ''}{more}",
        started=datetime.fromisoformat(document["started"]).timestamp(),
        finished=datetime.fromisoformat(document["finished"]).timestamp(),
        params=_params(document, names),
        metrics=[(name, float(value), 0) for name, value in _metrics(document).items() if value is not None],
        tags={"virnuc.out": str(root.resolve()), **labels, **prefect},
        inputs=document["inputs"],
        note="\n".join(f"- {line}" for line in str(document["summary"]).splitlines()),
        files=_own_files(root, _RUN_FILES) if is_flow else (),
        tables={"lanes": lanes} if is_flow and lanes else None,
        figures_of=root if is_flow else None,
    )


def _params(document: Mapping[str, Any], names: Sequence[str]) -> dict[str, Value]:
    """Every resolved setting, flat for comparison by column."""
    devices = [lane["device_name"] or lane["device"] for lane in document["lanes"]]
    params: dict[str, Value] = {name: document[name] for name in _PARAMS}
    params |= {"inputs": ",".join(names), "shards": document["shards"]["total"]}
    params |= {"devices": ",".join(dict.fromkeys(devices)), "switches": ",".join(document["switches"])}
    if head := document["head"]:
        params |= {"head": head["name"], "head_fingerprint": head["fingerprint"]}
    for model in document["models"]:
        own = {"model": model["name"], **{name: model[name] for name in _MODEL_PARAMS}}
        own |= {name: model["spec"][name] for name in ("embedding_dim", "num_layers")}
        params |= {f"{model['family']}_{name}": value for name, value in own.items()}
    return params


def _metrics(document: Mapping[str, Any]) -> dict[str, Any]:
    """All figures, flat for comparison between runs."""
    work, lanes, sample = document["work"], document["lanes"], document["sample"] or {}
    wall = sum(document["stage_seconds"].values())
    computed = sum(lane["sequences"] for lane in lanes)
    return {
        **(document["counts"] or {}),
        "share_viral_estimated": sample.get("share"),
        "expected_false_calls": sample.get("expected_false"),
        "expected_fdr": sample.get("expected_fdr"),
        **document["throughput"],
        **{f"{family}_packing_efficiency": share for family, share in document["packing_efficiency"].items()},
        **{
            f"{model['family']}_{name}": model[name]
            for model in work["models"]
            for name in ("fp32_batches", "out_of_memory")
        },
        **{f"{stage}_seconds": seconds for stage, seconds in document["stage_seconds"].items()},
        "wall_seconds": wall,
        "wall_sequences_per_second": computed / wall if wall else None,
        "sequences": work["frames"],
        **{name: work[name] for name in ("residues", "bases")},
        "tokens": sum(model["tokens"] for model in work["models"]),
        "shards": document["shards"]["total"],
        "computed_shards": document["shards"]["computed"],
        "lanes": len(lanes),
        "gpu_hours": sum(lane["seconds"] for lane in lanes if lane["device"] != "cpu") / 3600,
    }


def _with_training(entry: Entry, root: Path, document: Mapping[str, Any]) -> Entry:
    """Adds what training.figures has, and in a flow the head and its card, which lie beside the folder."""
    figures = _read(root / "training" / "figures.json")
    curves = [
        (f"member_{one['member']}/{name}", float(one[name]), int(one["epoch"]))
        for one in figures["history"]
        for name in ("train_loss", "validation_loss")
        if one[name] is not None
    ]
    fitted = ("temperature", float(figures["temperature"]), 0)
    metrics = [*entry.metrics, *_level_metrics(figures["test"], "test_"), fitted, *curves]
    if document["run_as"] != "flow":
        return replace(entry, metrics=metrics)
    head = RunFolder(root.resolve()).embedded
    beside = _own_files(head.parent, [f"{head.stem}{suffix}" for suffix in (head.suffix, ".md")])
    return replace(entry, metrics=metrics, files=[*entry.files, *_own_files(root, _TRAINING_FILES), *beside])


def _level_metrics(levels: Mapping[str, Mapping[str, Any]], prefix: str) -> list[Point]:
    """Scalar metrics of each level."""
    return [
        (f"{prefix}{level}_{name}", float(value), 0)
        for level, figures in levels.items()
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]


def _read(path: Path) -> dict[str, Any]:
    if path.resolve() != path.parent.resolve() / path.name:
        raise DamagedFileError(f"{path} is a link, which virnuc does not write: run the same command again.")
    try:
        return parse_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} cannot be read ({error}): run the same command again.") from error


def _own_files(root: Path, names: Sequence[str]) -> list[Path]:
    """Those of the files that are there, in the folder itself and no links."""
    paths = [(root / name, root.resolve() / name) for name in names]
    return [place for path, place in paths if path.is_file() and path.resolve() == place]


def _write(client: "MlflowClient", experiment: str, entry: Entry) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    found = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{entry.id}'", max_results=1)
    tags = {**_own_tags(), **entry.tags, _RUN_TAG: entry.id, "mlflow.note.content": entry.note}
    begin, end = int(entry.started * 1000), int(entry.finished * 1000)
    run = found[0] if found else client.create_run(experiment, begin, tags, entry.name)
    run_id = run.info.run_id
    params = {
        name: str(value)[:_MAX_PARAM_LENGTH] for name, value in entry.params.items() if value is not None
    }
    client.log_batch(
        run_id,
        metrics=[Metric(name, value, end, step) for name, value, step in entry.metrics],
        params=[Param(*param) for param in params.items() if param[1]],
        tags=[RunTag(*tag) for tag in tags.items()] if found else [],
    )
    context = [InputTag("mlflow.data.context", "input")]
    datasets = [
        Dataset(
            name=file["name"],
            digest=file["sha256"][:_MAX_DIGEST_LENGTH],
            source_type="local",
            source=json.dumps({"uri": file["name"]}),
            profile=json.dumps({"bytes": file["size"], "sha256": file["sha256"]}),
        )
        for file in entry.inputs
    ]
    client.log_inputs(run_id, [DatasetInput(dataset, context) for dataset in datasets])
    for path in entry.files:
        if path.stat().st_size <= MAX_ARTIFACT_BYTES:
            client.log_artifact(run_id, str(path))
    for name, rows in (entry.tables or {}).items():
        client.log_text(run_id, _tsv(rows), f"{name}.tsv")
    if entry.figures_of is not None:
        _draw(client, run_id, entry.figures_of)
    client.set_terminated(run_id, "FINISHED", end)


def _draw(client: "MlflowClient", run_id: str, root: Path) -> None:
    from tasks.pages.plots import run_figures

    with tempfile.TemporaryDirectory() as scratch:
        try:
            for name, figure in run_figures(RunFolder(root)):
                figure.savefig(Path(scratch) / f"{name}.png")
        except Exception as error:  # noqa: BLE001 - a figure is not worth a run, whatever is wrong with it
            _log.warning("a figure cannot be drawn (%s): it is left out", error)
        for path in sorted(Path(scratch).iterdir()):
            client.log_artifact(run_id, str(path))


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


def find_runs(condition: str) -> Iterator[tuple[Mapping[str, str], Mapping[str, float]]]:
    """Tags and metrics of the runs that fulfil a condition in MLflow's filter language."""
    client, experiment = Store().connection()
    for run in client.search_runs([experiment], condition):
        yield run.data.tags, run.data.metrics


def check_store() -> str:
    """Connects to the store as a run does; returns why it cannot be used, "" when it can."""
    try:
        Store().connection()
    except Exception as error:  # noqa: BLE001 - clients of stores raise what their libraries do
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return without_secrets((str(error).splitlines() or [type(error).__name__])[0])


def _connect() -> "tuple[MlflowClient, str]":
    # Read by MLflow on use. They prevent telemetry, which also delays process exit; waiting for a server that is down;
    # progress bars, and the address of each run on stdout.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
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
