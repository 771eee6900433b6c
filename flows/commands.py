"""What each command of the command line does; imported when a command runs, not for --help."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows.local_prefect import local_prefect
from flows.outputs import folder_of, require_inputs, require_no_input, require_run
from flows.settings import (
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
from flows.terminal import OutputMode, terminal
from virnuc_core.errors import DamagedFileError, UsageError, VirnucError
from virnuc_core.models.catalogue import require_heads, require_known_model, resolve_head, split_family
from virnuc_core.sequences.frame_store import write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import STDIN
from virnuc_core.specs import Family, RunConfig


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
    from virnuc_core.prediction.rescore import score_embeddings  # imports torch

    require_no_input(Path(out), [path for path in (embeddings, head, dna_head) if path is not None])
    folder_of(Path(out))
    with terminal(output):
        rows = score_embeddings(Path(embeddings), head, Path(out), dna_head)
    show(output, {"out": out, "counts": {"frames": rows}}, f"{rows} frames scored in {out}")


def run_inspect(path: str, *, output: OutputMode) -> int:
    """`virnuc inspect`; gives the exit code, that of a damaged file when something is not whole."""
    from virnuc_core.prediction.inspection import inspect_path  # imports torch

    with terminal(output):
        found = inspect_path(Path(path))
    show(output, found.document, found.summary)
    return 0 if found.is_whole else DamagedFileError.exit_code


def run_fsck(path: str, *, output: OutputMode) -> int:
    """`virnuc fsck`; gives the exit code, that of a damaged file when something is not whole."""
    from virnuc_core.prediction.fsck import check_path  # imports torch

    with terminal(output):
        found = check_path(Path(path))
    show(output, found.document, found.summary)
    return 0 if found.is_whole else DamagedFileError.exit_code


def require_models_and_head(config: RunConfig) -> None:
    """Says at once what is plainly wrong: starting Prefect and reading the inputs take their time.

    Raises:
        VirnucError: there can be no such model, no such head, or no head for these models.
    """
    require_models({"dnabert_s": config.dnabert_model, "esm2": config.esm_model})
    require_heads(config)


def require_models(models: Mapping[Family, str | None]) -> None:
    """Says at once when there can be no such model.

    Raises:
        CheckpointError: there can be none of that name.
    """
    for family, name in models.items():
        if name is not None:
            require_known_model(name, family)


@contextmanager
def readable(inputs: Sequence[str]) -> Iterator[list[str]]:
    """The inputs as files that can be read more than once: standard input is written to one first.

    Raises:
        InputError: an input is not there.
        UsageError: standard input is named twice.
    """
    require_inputs(inputs)
    if STDIN not in inputs:
        yield list(inputs)
        return
    if inputs.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read only once: name it once.")
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        spooled = Path(scratch) / "stdin"
        with open(spooled, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield [str(spooled) if name == STDIN else name for name in inputs]
        except VirnucError as error:
            # Nobody has given the path of the copy, and it is gone when the message is read.
            raise type(error)(str(error).replace(str(spooled), "standard input")) from error


def _drop_empty_table(path: Path) -> None:
    """Deletes a table that has only its header."""
    if path.exists():
        with path.open("rb") as lines:
            is_empty = sum(1 for _ in islice(lines, 2)) < 2
        if is_empty:
            path.unlink()


def show(output: OutputMode, document: Mapping[str, Any], summary: str) -> None:
    """Says the result on stdout, in the form that was asked for."""
    if output == "json":
        print(json.dumps(document))
    elif output == "human":
        print(summary)
