"""The commands of `virnuc`: their arguments, and what each does; heavy imports wait until a command runs."""

import gc
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

import click

from virnuc_cli.options import CONTEXT_SETTINGS, Answer, CommandGroup, command
from virnuc_core import __version__
from virnuc_core.errors import DamagedFileError, DeviceError, UsageError

if TYPE_CHECKING:
    from virnuc_cli.terminal import OutputMode
    from virnuc_core.settings import (
        EmbedSettings,
        FramesSettings,
        PredictSettings,
        TrainSettings,
    )

_INPUTS: Final = click.Argument(["inputs"], nargs=-1, required=True, metavar="INPUT...")
_LABELLED_FILES: Final = (
    click.Argument(["labelled"], nargs=-1, metavar="[LABELLED]..."),
    click.Option(["--viral"], multiple=True, metavar="FASTA...", help="Files of viral sequences only."),
    click.Option(["--other"], multiple=True, metavar="FASTA...", help="Files of non-viral sequences only."),
    click.Option(["--genbank"], multiple=True, metavar="FILE...", help="GenBank files, labelled by lineage."),
    click.Option(
        ["--labels"],
        metavar="TABLE",
        help="Table with columns seq_name and label or class for the sequences in LABELLED.",
    ),
)


def _out(metavar: str, meaning: str) -> click.Option:
    return click.Option(["-o", "--out"], required=True, metavar=metavar, help=meaning)


_OUT_FOLDER: Final = _out("DIR", "Output folder; repeat the command to resume an interrupted run.")


@click.group(cls=CommandGroup, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, prog_name="virnuc")
def cli() -> None:
    """Find viral sequences in assemblies and long reads with the language models ESM-2 and DNABERT-S."""


def _body(name: str, devices: tuple[str, ...]) -> Callable[..., Answer]:
    """What computes a command: the function that its flow calls, too; imports take seconds, here and for `devices`."""
    from tasks.artifacts import log_from_info
    from virnuc_core.env_config import value_of
    from virnuc_core.inference.lane_process import start_early
    from virnuc_core.plain_text import hide_secrets_in_logs
    from virnuc_core.settings import LANE_DEFAULTS
    from virnuc_core.versions import log_version_warnings

    hide_secrets_in_logs()
    log_version_warnings()
    log_from_info()
    # Read by torch's OpenMP when it is loaded. Where other programs compute, threads that wait for each other by spinning for
    # milliseconds, its default, take several times as long.
    if value_of("OMP_WAIT_POLICY") is None:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if shutil.which("nvidia-smi"):
        start_early(devices)
    gc.disable()  # looking for garbage takes a fifth of the time of imports, which leave none
    body = resolve_name(f"flows.runs:{name}")
    gc.freeze()
    gc.enable()

    def compute(*arguments: Any) -> Answer:
        report = body(*arguments, LANE_DEFAULTS)
        return Answer(report.document, report.summary)

    return compute


@command(cli, _INPUTS, _OUT_FOLDER, settings="PredictSettings", is_run=True)
def predict(inputs: tuple[str, ...], out: str, settings: "PredictSettings", force: bool) -> Answer:
    """Classify sequences as viral or non-viral.

    INPUT is FASTA or FASTQ, plain or compressed; - reads standard input.
    """
    from virnuc_cli.preflight import readable, require_models_and_head

    require_models_and_head(settings)
    with readable(inputs):
        return _body("predict", settings.devices)(inputs, out, settings, force)


@command(
    cli,
    _INPUTS,
    _out("FILE.h5", "Embeddings file; the run folder is FILE.h5.run."),
    click.Option(
        ["--model"],
        required=True,
        metavar="MODEL",
        help="esm2:NAME|PATH for proteins, dnabert:NAME|PATH for DNA, or only a path.",
    ),
    settings="EmbedSettings",
    is_run=True,
)
def embed(inputs: tuple[str, ...], out: str, model: str, settings: "EmbedSettings", force: bool) -> Answer:
    """Compute one mean embedding for each sequence in INPUT."""
    from virnuc_cli.preflight import readable
    from virnuc_core.models.catalogue import require_known_model, split_family

    family, name = split_family(model)
    require_known_model(name, family)
    with readable(inputs):
        return _body("embed", settings.devices)(inputs, out, model, settings, force)


@command(
    cli,
    click.Argument(["path"], metavar="RUN|EMBEDDINGS"),
    click.Option(
        ["--head"], required=True, metavar="PATH", help="Classifier head trained on the same models."
    ),
    _out("DIR|FILE.tsv", "New run folder, or table with one score per frame."),
)
def score(path: str, head: str, out: str) -> Answer:
    """Score stored embeddings with another classifier head.

    For the folder of a finished predict run, DIR gets all tables and the report. For an embeddings file, FILE.tsv gets one
    score per frame.
    """
    from virnuc_cli.preflight import require_writable
    from virnuc_core.results.rescore import score_embeddings, score_run  # imports torch
    from virnuc_core.results.run_opening import require_no_input

    if Path(path).is_dir():
        report = score_run(Path(path), head, Path(out))
        return Answer(report.document, report.summary)
    require_no_input(Path(out), [path, head])
    require_writable(Path(out))
    rows = score_embeddings(Path(path), head, Path(out))
    return Answer({"out": out, "counts": {"frames": rows}}, f"{rows:,} frames scored: {out}")


@command(
    cli,
    *_LABELLED_FILES,
    _out("FILE.safetensors", "Classifier head; the run folder is FILE.run."),
    settings="TrainSettings",
    is_run=True,
)
def train(out: str, settings: "TrainSettings", force: bool, **files: Any) -> Answer:
    """Train a classifier head on labelled sequences.

    Labels come from the flag of a file (--viral, --other), the lineage of a GenBank record, or a table (--labels).
    """
    from virnuc_cli.preflight import require_inputs, require_models, require_writable

    require_writable(Path(out))
    require_models(settings.esm_model, settings.dnabert_model)
    require_inputs([*_paths(files), *filter(None, [settings.groups])])
    compute = _body("train", settings.devices)
    from virnuc_core.training.labels import LabelledFiles

    return compute(LabelledFiles(**files), out, settings, force)


@command(cli, *_LABELLED_FILES, _OUT_FOLDER, settings="PredictSettings", is_run=True)
def evaluate(out: str, settings: "PredictSettings", force: bool, **files: Any) -> Answer:
    """Measure accuracy and calibration on labelled sequences, by class and by length."""
    from virnuc_cli.preflight import require_inputs, require_models_and_head

    require_models_and_head(settings)
    require_inputs(_paths(files))
    compute = _body("evaluate", settings.devices)
    from virnuc_core.training.labels import LabelledFiles

    return compute(LabelledFiles(**files), out, settings, force)


def _paths(files: Mapping[str, Any]) -> list[str]:
    several = [path for name in ("viral", "other", "genbank", "labelled") for path in files[name]]
    return [*several, *filter(None, [files["labels"]])]


@command(
    cli,
    _INPUTS,
    _out("FILE.tsv[.gz]", "Table with columns frame_id, nucleotide and protein."),
    settings="FramesSettings",
)
def frames(inputs: tuple[str, ...], out: str, settings: "FramesSettings") -> Answer:
    """Write the open reading frames of INPUT to a table."""
    from tempfile import TemporaryDirectory

    from virnuc_cli.preflight import readable, require_writable
    from virnuc_core.files import is_stream
    from virnuc_core.results.run_opening import require_no_input
    from virnuc_core.sequences.frame_store import write_frames_tsv
    from virnuc_core.sequences.frame_store_build import build_frame_store

    path = Path(out)
    # Beside a device or pipe there is no place for a table.
    rejected = None if is_stream(path) else Path(f"{out}.rejected.tsv")
    for written in filter(None, (path, rejected)):
        require_no_input(written, inputs)
        require_writable(written)
    with readable(inputs), TemporaryDirectory(dir=rejected and rejected.parent) as scratch:
        store = build_frame_store(
            inputs, Path(scratch) / "frames", settings.chunk_length, rejected_copy=rejected
        )
        write_frames_tsv(store, path)
        meta = store.meta
    counts = {name: getattr(meta, f"num_{name}") for name in ("records", "rejected", "chunks", "frames")}
    document: dict[str, Any] = {"out": str(path), "counts": counts}
    summary = f"{meta.num_frames:,} open reading frames of {meta.num_records:,} sequences: {path}"
    if meta.num_rejected:
        document["rejected"] = rejected and str(rejected)
        summary += f"\n{meta.num_rejected:,} sequences skipped; "
        summary += f"reasons: {rejected}" if rejected else "for the reasons, give a file as --out"
    return Answer(document, summary)


@command(cli, click.Argument(["path"]))
def inspect(path: str) -> Answer:
    """Identify a file or folder and verify that it is intact.

    PATH is a run folder, shard, embeddings file, classifier head, checkpoint or sequence file.
    """
    from virnuc_core.results.inspect import inspect_path  # imports torch

    found = inspect_path(Path(path))
    return Answer(found.document, found.summary, 0 if found.is_intact else DamagedFileError.exit_code)


@command(
    cli,
    click.Option(["--quick"], is_flag=True, help="Skip the self-test on each device."),
    click.Option(
        ["--compare"],
        metavar="MODEL",
        help="Only compare the embeddings of this model with those of its original program.",
    ),
)
def doctor(quick: bool, compare: str | None, output: "OutputMode") -> Answer:
    """Check the installation and run a self-test.

    Checks versions, GPUs and VIRNUC_HOME. Exit code: 0 without problems, 5 for a problem with a GPU or its software, 2 for
    any other problem. With --compare: 0 if the embeddings agree within rounding, else 5.
    """
    if compare is not None:
        from virnuc_cli.terminal import terminal
        from virnuc_core.doctor.comparison import compare_model  # imports torch

        with terminal(output):
            compared = compare_model(compare)
        return Answer(asdict(compared), compared.summary, 0 if compared.is_same else DeviceError.exit_code)
    from virnuc_core.doctor.checks import all_findings  # imports torch

    findings = []
    for finding in all_findings(quick=quick):
        findings.append(finding)
        if output == "human" or (output == "quiet" and finding.state != "ok"):
            click.echo(finding.summary)
    problems = [finding for finding in findings if finding.state == "problem"]
    warnings = sum(finding.state == "warning" for finding in findings)
    exit_code = 0
    if problems:
        is_device = any(finding.is_device for finding in problems)
        exit_code = DeviceError.exit_code if is_device else UsageError.exit_code
    return Answer(
        {
            "findings": [asdict(finding) for finding in findings],
            "problems": len(problems),
            "warnings": warnings,
        },
        f"{len(findings)} checks: {len(problems)} problems, {warnings} warnings",
        exit_code,
    )
