"""`virnuc report`: the report of a finished run written anew, with figures by class where labels are given."""

from pathlib import Path
from typing import Any, Final, Literal

import click

from flows.outputs import require_run
from virnuc_core.errors import DamagedFileError, InputError, UsageError
from virnuc_core.json_records import parse_object
from virnuc_core.run_folder import RunFolder

REPORT_OPTIONS: Final = (
    click.argument("run", metavar="RUN"),
    click.option(
        "--labels", metavar="FILE.tsv", help="Table of contig and class: adds figures by class [none]."
    ),
)


def run_report(run: str, *, labels: str | None, output: Literal["human", "quiet", "json"]) -> None:
    """Writes report.html of a run again, from its tables and run.json.

    Raises:
        InputError: RUN is no folder of a run, the run is not finished, or the labels cannot be read.
        UsageError: it is an embed run, or another run works in that folder.
        DamagedFileError: a result file or run.json is not as virnuc wrote it.
    """
    from flows.commands import show
    from flows.local_prefect import prepare_local_prefect
    from flows.terminal import terminal
    from virnuc_core.prediction.report.html import write_report_page
    from virnuc_core.prediction.report.labels import read_labels
    from virnuc_core.prediction.result_files import records_of, require_unchanged

    require_run(Path(run))
    classes = None if labels is None else read_labels(_table(labels))
    prepare_local_prefect()  # before the next line imports Prefect
    from virnuc_core.prediction.run_json import write_document
    from virnuc_core.prediction.run_opening import open_run_folder

    with terminal(output), open_run_folder(Path(run), force=False) as folder:
        document = _document(folder)
        require_unchanged(folder.report, folder.page)
        write_report_page(folder, document, classes)
        others = [record for record in document["files"] if record["name"] != folder.page.name]
        write_document(folder.report, {**document, "files": others + records_of([folder.page])})
    contigs = document["counts"]["records"]
    summary = f"report of {contigs} contigs: {folder.page}"
    show(output, {"report": str(folder.page), "counts": document["counts"], "labels": labels}, summary)


def _table(labels: str) -> Path:
    path = Path(labels)
    if not path.is_file():
        raise InputError(f"--labels {labels} is no file: give a tab-separated table of contig and class.")
    return path


def _document(folder: RunFolder) -> dict[str, Any]:
    """The content of a run's run.json."""
    if not folder.report.exists():
        raise InputError(
            f"{folder.root} has no {folder.report.name}, so its run is not finished: run the same command again."
        )
    try:
        document = parse_object(folder.report.read_bytes())
    except ValueError as error:
        raise DamagedFileError(
            f"{folder.report} cannot be read ({error}): run the same command again."
        ) from error
    if document.get("kind") != "predict":
        raise UsageError(f"{folder.root} holds no predict run: only those have a report.")
    return document
