"""What each command of the command line does; imported when a command runs, not for --help."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows.local_prefect import local_prefect
from flows.settings import EmbedSettings, PredictSettings, read_settings
from flows.terminal import OutputMode, terminal
from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.sequences.frame_store import write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import STDIN


def run_predict(
    inputs: Sequence[str], *, out: str, force: bool, settings: Mapping[str, Any], output: OutputMode
) -> None:
    """`virnuc predict`."""
    chosen = read_settings(PredictSettings, settings)
    with terminal(output), readable(inputs) as files, local_prefect():
        from flows.predict import predict

        report = predict(files, out, chosen, force)
    show(output, report.document, report.summary)


def run_embed(
    inputs: Sequence[str],
    *,
    out: str,
    model: str,
    force: bool,
    settings: Mapping[str, Any],
    output: OutputMode,
) -> None:
    """`virnuc embed`."""
    chosen = read_settings(EmbedSettings, settings)
    with terminal(output), readable(inputs) as files, local_prefect():
        from flows.embed import embed

        report = embed(files, out, model, chosen, force)
    show(output, report.document, report.summary)


def run_frames(inputs: Sequence[str], *, chunk_length: int, out: str, output: OutputMode) -> None:
    """`virnuc frames`."""
    path = Path(out)
    with terminal(output), readable(inputs) as files, TemporaryDirectory(dir=folder_of(path)) as scratch:
        store = build_frame_store(files, Path(scratch) / "frames", chunk_length)
        write_frames_tsv(store, path)
        meta = store.meta
    counts = {
        "records": meta.num_records,
        "rejected": meta.num_rejected,
        "chunks": meta.num_chunks,
        "frames": meta.num_frames,
    }
    summary = f"{meta.num_frames} open frames of {meta.num_records} records in {path}"
    show(output, {"out": str(path), "counts": counts}, summary)


def run_score(embeddings: str, *, head: str, out: str, output: OutputMode) -> None:
    """`virnuc score`."""
    from virnuc_core.prediction.rescore import score_embeddings  # imports torch

    folder_of(Path(out))
    with terminal(output):
        rows = score_embeddings(Path(embeddings), head, Path(out))
    show(output, {"out": out, "counts": {"frames": rows}}, f"{rows} frames scored in {out}")


def run_inspect(path: str, *, output: OutputMode) -> int:
    """`virnuc inspect`; gives the exit code, that of a damaged file when something is not whole."""
    from virnuc_core.prediction.inspection import inspect_path  # imports torch

    with terminal(output):
        found = inspect_path(Path(path))
    show(output, found.document, found.summary)
    return 0 if found.is_whole else DamagedFileError.exit_code


@contextmanager
def readable(inputs: Sequence[str]) -> Iterator[list[str]]:
    """The inputs as files that can be read more than once: standard input is written to one first.

    Raises:
        UsageError: standard input is named twice.
    """
    if STDIN not in inputs:
        yield list(inputs)
        return
    if inputs.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read only once: name it once.")
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        spooled = Path(scratch) / "stdin"
        with open(spooled, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield [str(spooled) if name == STDIN else name for name in inputs]


def folder_of(out: Path) -> Path:
    """The folder of an output file, before any work is done for it.

    Raises:
        UsageError: it is not there.
    """
    folder = out.absolute().parent
    if not folder.is_dir() or out.is_dir():
        raise UsageError(f"--out {out} cannot be written: it must be a file in a folder that exists.")
    return folder


def show(output: OutputMode, document: Mapping[str, Any], summary: str) -> None:
    """Says the result on stdout, in the form that was asked for."""
    if output == "json":
        print(json.dumps(document))
    elif output == "human":
        print(summary)
