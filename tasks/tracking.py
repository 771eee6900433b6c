"""MLflow runs: one per flow run in the experiment `virnuc`, with one child run per lane.

Tracking is best effort and never fails a run: what MLflow does not take is kept (see `run_record`).
"""

import getpass
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from tasks.run_record import RunRecord
from virnuc_core import __version__
from virnuc_core.env_config import env
from virnuc_core.plain_text import without_secrets
from virnuc_core.remote import is_url
from virnuc_core.specs import InputFile

if TYPE_CHECKING:
    pass

_SECONDS_TO_END: Final = 5.0

Value = str | int | float | bool | None
Status = Literal["FINISHED", "FAILED", "KILLED"]

_log = logging.getLogger(__name__)


class MetricPoint(NamedTuple):
    """A metric at one moment; `time` in Unix seconds."""

    key: str
    value: float
    step: int
    time: float


class TrackedRun:
    """One MLflow run, of a record; without one, nothing is recorded."""

    def __init__(self, record: RunRecord | None, number: int = 0) -> None:
        self._record = record
        self._number = number

    @classmethod
    def open(
        cls,
        record: RunRecord,
        name: str,
        params: Mapping[str, Value],
        tags: Mapping[str, str],
        *,
        start_time: float | None = None,
        parent: int | None = None,
    ) -> Self:
        """Starts a run; `start_time` in Unix seconds, now by default."""
        run = cls(record, next(record.numbers))
        labels = {**_user_and_source(), **tags}
        run._send("open", name=name, tags=labels, time=start_time or time.time(), parent=parent)
        run.log_params(params)
        return run

    def child(
        self, name: str, params: Mapping[str, Value], tags: Mapping[str, str], start_time: float | None = None
    ) -> "TrackedRun":
        """Starts a child run; `start_time` in Unix seconds."""
        if self._record is None:
            return TrackedRun(None)
        return TrackedRun.open(self._record, name, params, tags, start_time=start_time, parent=self._number)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None while MLflow does not have it.

        Waits until what was recorded so far is written or kept.
        """
        if self._record is None:
            return None
        self._record.wait()
        return self._record.store.run_ids.get(self._number)

    @property
    def links(self) -> dict[str, str]:
        """This run's MLflow id and, with a server, its page; as for `run_id`, empty while MLflow does not have it."""
        if self._record is None or (run_id := self.run_id) is None:
            return {}
        links = {"mlflow_run_id": run_id}
        server = urlsplit(env().tracking_uri or "")
        if server.scheme in ("http", "https"):
            address = without_secrets(f"{server.scheme}://{server.netloc}{server.path.rstrip('/')}")
            experiment = self._record.store.experiment
            links["mlflow_run_url"] = f"{address}/#/experiments/{experiment}/runs/{run_id}"
        return links

    def log_params(self, params: Mapping[str, Value]) -> None:
        """Records settings; MLflow accepts each once."""
        self._send("params", values={key: str(value) for key, value in params.items()})

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0, at: float | None = None) -> None:
        """Records metrics at one step; `at` in Unix seconds, now by default."""
        moment = at or time.time()
        self.log_points([MetricPoint(key, value, step, moment) for key, value in metrics.items()])

    def log_points(self, points: Sequence[MetricPoint]) -> None:
        """Records metrics of several moments in as few requests as possible."""
        if points:
            self._send("points", points=[[p.key, float(p.value), p.step, p.time] for p in points])

    def log_inputs(self, files: Sequence[InputFile], paths: Sequence[str]) -> None:
        """Records input files as datasets, identified by their content."""
        datasets = [
            {
                "name": file.name,
                "sha256": file.sha256,
                "source": json.dumps({"uri": path if is_url(path) else str(Path(path).resolve())}),
                "profile": json.dumps({"bytes": file.size, "sha256": file.sha256}),
            }
            for file, path in zip(files, paths, strict=False)
        ]
        self._send("inputs", files=datasets)

    def log_files(self, paths: Sequence[Path]) -> None:
        """Copies files into the store, except those above its size limit."""
        self._send("files", paths=[str(path.absolute()) for path in paths])

    def log_table(self, name: str, rows: Sequence[Mapping[str, Value]]) -> None:
        """Records `NAME.tsv`; missing values are empty."""
        columns = list(dict.fromkeys(chain.from_iterable(rows)))
        lines = [columns, *([_tsv_cell(row.get(column)) for column in columns] for row in rows)]
        text = "".join("\t".join(line) + "\n" for line in lines)
        self._send("text", name=f"{name}.tsv", text=text)

    def log_figure(self, name: str, **data: object) -> None:
        """Records `NAME.png`, a figure of `tasks.pages.plots.RUN_FIGURES`; `data` are plain JSON values."""
        self._send("figure", name=name, data=data)

    def register_head(
        self,
        name: str,
        path: Path,
        tags: Mapping[str, str],
        description: str,
        *,
        features: int,
        champion: bool = False,
    ) -> None:
        """Registers a head, with its index if there is one, as the next version of a model; champion if asked for or the first.

        Args:
            name: of the model.
            path: of the head.
            tags: of the version.
            description: of the version, in Markdown.
            features: length of the vectors that the head takes.
            champion: whether it takes the place of the present champion.
        """
        self._send(
            "model",
            name=name,
            path=str(path.absolute()),
            tags=dict(tags),
            description=description,
            features=features,
            champion=champion,
        )

    def describe(self, markdown: str) -> None:
        """Sets the text on the run's page."""
        self._send("note", text=markdown)

    def finish(self, status: Status, at: float | None = None) -> None:
        """Ends the run; `at` in Unix seconds, now by default."""
        self._send("end", status=status, time=at or time.time())

    def hurry(self) -> None:
        """This process may be killed soon: only a few seconds more are spent on requests, and the rest is kept."""
        if self._record is not None:
            self._record.hurry(_SECONDS_TO_END)

    def _send(self, what: str, **values: object) -> None:
        if self._record is not None:
            self._record.send({"run": self._number, "do": what, **values})


# The parent of new runs; a subflow inherits it with the context.
_enclosing: ContextVar[TrackedRun | None] = ContextVar("enclosing", default=None)


def current_run() -> TrackedRun:
    """The run of the enclosing `tracked_run`, or one that records nothing."""
    return _enclosing.get() or TrackedRun(None)


@contextmanager
def tracked_run(
    name: str, params: Mapping[str, Value], tags: Mapping[str, str], folder: Path | None = None
) -> Iterator[TrackedRun]:
    """Opens an MLflow run for the block, as a child inside another one.

    Args:
        name: of the run.
        params: its settings.
        tags: its tags.
        folder: of the run, where is kept what MLflow does not take; virnuc's home by default.
    """
    outer, record = _enclosing.get(), None
    if outer is not None:
        run = outer.child(name, params, tags)
    else:
        record = RunRecord.create(folder)
        run = TrackedRun.open(record, name, params, tags)
        record.submit(record.complete_earlier)
    token = _enclosing.set(run)
    status: Status = "KILLED"  # Ctrl-C, or Prefect's stop signal
    try:
        yield run
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        if status == "KILLED":
            run.hurry()
        run.finish(status)
        _enclosing.reset(token)
        if record is not None:
            record.close()


def _tsv_cell(value: Value) -> str:
    return "" if value is None else " ".join(str(value).split())


def _user_and_source() -> dict[str, str]:
    """The columns "User" and "Source" of MLflow's list of runs."""
    user = {}
    with suppress(KeyError, OSError):  # a container's user id may have no name
        user["mlflow.user"] = getpass.getuser()
    return {**user, "mlflow.source.name": f"virnuc {__version__}", "mlflow.source.type": "LOCAL"}
