"""What the commands on runs and files do (predict, report, export, bench, ...); imported when one runs, not for --help."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows.outputs import require_no_input, require_run
from virnuc_cli.local_prefect import local_prefect, prepare_local_prefect
from virnuc_cli.preflight import folder_of, readable, require_models, require_models_and_head
from virnuc_cli.terminal import OutputMode, show, terminal
from virnuc_core.benchmark.settings import BenchSettings
from virnuc_core.errors import DamagedFileError, InputError, UsageError
from virnuc_core.files import parse_object
from virnuc_core.models.catalogue import require_known_model, resolve_head, split_family
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import (
    LANE_DEFAULTS,
    EmbedSettings,
    FramesSettings,
    LaneMode,
    LaneSettings,
    PredictSettings,
    ReprocessSettings,
    predict_config,
    read_settings,
)
from virnuc_core.specs import Family


def run_predict(
    inputs: Sequence[str],
    *,
    out: str,
    force: bool,
    settings: Mapping[str, Any],
    output: OutputMode,
    mode: LaneMode = LANE_DEFAULTS.mode,
    lane_minutes: float = LANE_DEFAULTS.lane_minutes,
) -> None:
    """`virnuc predict`."""
    chosen = read_settings(PredictSettings, settings)
    lanes = read_settings(LaneSettings, {"mode": mode, "lane_minutes": lane_minutes})
    require_models_and_head(predict_config(chosen))
    with terminal(output), readable(inputs) as files, local_prefect(lasting=lanes.mode == "pool"):
        from flows.predict import predict

        report = predict(files, out, chosen, force, lanes.mode, lanes.lane_minutes)
    show(output, report.document, report.summary)


def run_reprocess(
    run: str,
    *,
    force: bool,
    settings: Mapping[str, Any],
    output: OutputMode,
    mode: LaneMode = LANE_DEFAULTS.mode,
    lane_minutes: float = LANE_DEFAULTS.lane_minutes,
) -> None:
    """`virnuc reprocess`."""
    given = {name: value for name, value in settings.items() if value is not None}
    chosen = read_settings(ReprocessSettings, given)
    lanes = read_settings(LaneSettings, {"mode": mode, "lane_minutes": lane_minutes})
    require_run(Path(run))
    models: dict[Family, str | None] = {"dnabert_s": chosen.dnabert_model, "esm2": chosen.esm_model}
    require_models(models)
    for head in (chosen.head, chosen.dna_head):
        if head is not None:
            resolve_head(head)
    with terminal(output), local_prefect(lasting=lanes.mode == "pool"):
        from flows.reprocess import reprocess

        report = reprocess(run, chosen, force, lanes.mode, lanes.lane_minutes)
    show(output, report.document, report.summary)


def run_embed(
    inputs: Sequence[str],
    *,
    out: str,
    model: str,
    force: bool,
    settings: Mapping[str, Any],
    output: OutputMode,
    mode: LaneMode = LANE_DEFAULTS.mode,
    lane_minutes: float = LANE_DEFAULTS.lane_minutes,
) -> None:
    """`virnuc embed`."""
    chosen = read_settings(EmbedSettings, settings)
    lanes = read_settings(LaneSettings, {"mode": mode, "lane_minutes": lane_minutes})
    family, name = split_family(model)
    require_known_model(name, family)
    require_no_input(Path(out), inputs)
    if Path(out).is_dir():
        raise UsageError(f"--out {out} is a folder: name a file, such as {Path(out) / 'vectors.h5'}.")
    with terminal(output), readable(inputs) as files, local_prefect(lasting=lanes.mode == "pool"):
        from flows.embed import embed

        report = embed(files, out, model, chosen, force, lanes.mode, lanes.lane_minutes)
    show(output, report.document, report.summary)


def run_frames(inputs: Sequence[str], *, chunk_length: int, out: str, output: OutputMode) -> None:
    """`virnuc frames`."""
    chosen = read_settings(FramesSettings, {"chunk_length": chunk_length})
    path, rejected = Path(out), Path(f"{out}.rejected.tsv")
    for written in (path, rejected):
        require_no_input(written, inputs)
    folder = folder_of(path)
    with terminal(output), readable(inputs) as files, TemporaryDirectory(dir=folder) as scratch:
        try:
            store = build_frame_store(
                files, Path(scratch) / "frames", chosen.chunk_length, rejected_copy=rejected
            )
        finally:
            _drop_empty_table(rejected)
        write_frames_tsv(store, path)
        meta = store.meta
    counts = {
        "records": meta.num_records,
        "rejected": meta.num_rejected,
        "chunks": meta.num_chunks,
        "frames": meta.num_frames,
    }
    document: dict[str, Any] = {"out": str(path), "counts": counts}
    summary = f"{meta.num_frames} open frames of {meta.num_records} records in {path}"
    if meta.num_rejected:
        document["rejected"] = str(rejected)
        summary += f"\n{meta.num_rejected} records cannot be used, see {rejected}"
    show(output, document, summary)


def run_score(embeddings: str, *, head: str, dna_head: str | None, out: str, output: OutputMode) -> None:
    """`virnuc score`."""
    from virnuc_core.results.rescore import score_embeddings  # imports torch

    require_no_input(Path(out), [path for path in (embeddings, head, dna_head) if path is not None])
    folder_of(Path(out))
    with terminal(output):
        rows = score_embeddings(Path(embeddings), head, Path(out), dna_head)
    show(output, {"out": out, "counts": {"frames": rows}}, f"{rows} frames scored in {out}")


def run_inspect(path: str, *, output: OutputMode) -> int:
    """`virnuc inspect`; gives the exit code, that of a damaged file when something is not whole."""
    from virnuc_core.results.integrity import inspect_path  # imports torch

    with terminal(output):
        found = inspect_path(Path(path))
    show(output, found.document, found.summary)
    return 0 if found.is_complete else DamagedFileError.exit_code


def run_fsck(path: str, *, output: OutputMode) -> int:
    """`virnuc fsck`; gives the exit code, that of a damaged file when something is not whole."""
    from virnuc_core.results.integrity import inspect_path  # imports torch

    with terminal(output):
        found = inspect_path(Path(path), thorough=True)
    show(output, found.document, found.summary)
    return 0 if found.is_complete else DamagedFileError.exit_code


def run_report(run: str, *, labels: str | None, output: OutputMode) -> None:
    """Writes report.html of a run again, from its tables and run.json.

    Raises:
        InputError: RUN is no folder of a run, the run is not finished, or the labels cannot be read.
        UsageError: it is an embed run, or another run works in that folder.
        DamagedFileError: a result file or run.json is not as virnuc wrote it.
    """
    from virnuc_core.results.report.data import read_labels
    from virnuc_core.results.report.page import write_report_page
    from virnuc_core.results.run_json import records_of, require_unchanged, write_document
    from virnuc_core.results.run_opening import open_run_folder

    require_run(Path(run))
    classes = None if labels is None else read_labels(_table(labels))
    prepare_local_prefect()
    with terminal(output), open_run_folder(Path(run), force=False) as folder:
        document = _document(folder)
        require_unchanged(folder.report, folder.page)
        write_report_page(folder, document, classes)
        others = [record for record in document["files"] if record["name"] != folder.page.name]
        write_document(folder.report, {**document, "files": others + records_of([folder.page])})
    contigs = document["counts"]["records"]
    summary = f"report of {contigs} contigs: {folder.page}"
    show(output, {"report": str(folder.page), "counts": document["counts"], "labels": labels}, summary)


def run_export(embeddings: str, *, to: str, vectors: str, output: OutputMode) -> None:
    """`virnuc export`."""
    from virnuc_core.results.embeddings import export_embeddings

    require_no_input(Path(to), (embeddings,))
    folder_of(Path(to))
    with terminal(output):
        rows = export_embeddings(embeddings, to, vectors=None if vectors == "all" else vectors)
    show(output, {"out": to, "counts": {"rows": rows}}, f"{rows} rows in {to}")


def run_bench(values: Mapping[str, Any], output: OutputMode) -> None:
    """`virnuc bench`."""
    from virnuc_core.benchmark.report import text_table
    from virnuc_core.benchmark.run import run_benchmark  # imports torch

    settings = BenchSettings(**values)
    command = shlex.join(["virnuc", "bench", *settings.arguments()])
    with terminal(output):
        result = run_benchmark(settings, command)
    show(output, result, text_table(result["cases"]))


def _drop_empty_table(path: Path) -> None:
    """Deletes a table that has only its header."""
    if path.exists():
        with path.open("rb") as lines:
            is_empty = sum(1 for _ in islice(lines, 2)) < 2
        if is_empty:
            path.unlink()


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
