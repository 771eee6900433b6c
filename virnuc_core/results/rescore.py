"""Scores stored vectors with another head: those of a run, into a run of its own, or those of an embeddings file."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from virnuc_core.errors import DamagedFileError, InputError, MismatchError, UsageError
from virnuc_core.files import temporary_name
from virnuc_core.inference.plan import RunPlan, read_plan, write_plan
from virnuc_core.inference.planning import plan_head
from virnuc_core.inference.runner import Scorer, load_planned_head
from virnuc_core.inference.shard import (
    VECTOR_DATASETS,
    ShardCounters,
    ShardResult,
    pending_shards,
    shard_identity,
    write_shard,
)
from virnuc_core.models.catalogue import resolve_head
from virnuc_core.models.heads import ContigHead, Head, load_head
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import FEATURES, SCORES, SIZES, Embeddings
from virnuc_core.results.run_json import RunReport, write_report
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.results.tables import FRAME_COLUMNS, frame_lines, write_tables
from virnuc_core.results.writers import header_line, open_stream
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore


def score_run(run: Path, head: str, out: Path) -> RunReport:
    """Makes all tables of the predict run in folder `run` with another head, in folder `out`, from the stored vectors.

    `out` is a finished run like any other, without vectors; `head` is the name of a bundled one or a path.

    Raises:
        CheckpointError: the head cannot be used.
        DamagedFileError: a file of the run is missing or corrupt.
        InputError: the run is not finished.
        MismatchError: the head is for other chunks, frames or models; or `out` holds another run.
        UsageError: it is no predict run, or has kept no vectors.
    """
    source = RunFolder(run)
    if not source.report.exists():
        raise InputError(f"{run} contains no finished run: give the --out of a finished `virnuc predict`.")
    old = read_plan(source.plan)
    if old.kind != "predict":
        raise UsageError(f"{run} contains no predict run: only those have tables.")
    old.require_own_series()
    new_head = plan_head(head, old.models, old.chunk_length, old.frames)
    is_rounded = old.embeddings != "float32"
    note = f"Scored from the {old.embeddings} embeddings of {run.name}: a run with this head may differ in the last digits."
    plan = replace(old, head=new_head, embeddings="none", warnings=(note,) if is_rounded else ())
    store = FrameStore.open(source.frames)
    with open_run_folder(out, force=False) as folder, Embeddings(source.embeddings, own=True) as file:
        matrices = _matrices_of_both_models(file)
        if file.attrs["plan_fingerprint"] != old.fingerprint or len(file) != store.num_frames:
            raise MismatchError(f"{file.path} does not belong to {source.plan}: run the same command again.")
        if not folder.plan.exists():
            _copy_store(store.folder, folder.frames)
            write_plan(folder.plan, plan)
        elif read_plan(folder.plan).fingerprint != plan.fingerprint:
            raise MismatchError(f"{out} contains another run: choose another --out.")
        _write_shards(folder, plan, store, file, matrices)
        work = aggregate(folder, plan, store)
        counts = write_tables(
            folder, store, load_planned_head(new_head), plan.calls, calibrated=new_head.calibrated
        )
        report = RunReport(plan=plan, out=str(out), counts=counts, work=work, lanes=(), seconds={}, links={})
        write_report(folder.report, report)
    return report


def _copy_store(source: Path, target: Path) -> None:
    if not target.exists():
        temporary = temporary_name(target)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, copy_function=_link)
        temporary.rename(target)


def _link(source: str, target: str) -> None:
    """A second name for a file that never changes, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_shards(
    folder: RunFolder, plan: RunPlan, store: FrameStore, file: Embeddings, matrices: tuple[str, ...]
) -> None:
    assert plan.head is not None
    scorer = Scorer(load_planned_head(plan.head), "cpu")
    folder.shards.mkdir(exist_ok=True)
    for index in pending_shards(folder, plan):
        shard = plan.shards[index]
        rows = np.arange(shard.begin, shard.end)
        vectors = [_finite_rows(file, name, shard.begin, shard.end) for name in matrices]
        found = scorer.score(*vectors, sizes=store.sizes(rows))
        counters = ShardCounters(frames=len(rows), residues=0, bases=0, models=())
        result = ShardResult(dna=None, protein=None, counters=counters, **found)
        write_shard(folder.shard(index), result, shard_identity(plan, shard))


def score_embeddings(embeddings: Path, head: str, out: Path) -> int:
    """Writes a table like `prediction_results.txt` from an embeddings file, block by block; returns its number of rows.

    `head` is the name of a bundled one or a path. Scores of float16 vectors differ slightly from those of the run, which are
    computed before rounding.

    Raises:
        CheckpointError: the head cannot be used, or a torch file holds more than tensors and names.
        DamagedFileError: the embeddings file is corrupt, or is another kind of file.
        InputError: the embeddings file does not exist.
        MismatchError: the head takes features of another width, or was trained for chunks of another length or for other frames.
        UsageError: the file does not hold the vectors of both models, or lacks the sizes of its ORFs.
    """
    with Embeddings(embeddings) as file:
        matrices = _matrices_of_both_models(file)
        chunk_length = file.attrs.get("chunk_length") or None
        scorer = Scorer(_head_for(file, resolve_head(head, chunk_length, file.frames), matrices), "cpu")
        with open_stream(out) as write:
            write(header_line(FRAME_COLUMNS))
            for begin in range(0, len(file), 2048):
                end = min(begin + 2048, len(file))
                parts = [_finite_rows(file, name, begin, end) for name in matrices]
                sizes = file.rows(SIZES, begin, end) if SIZES in file else None
                ids = pa.array(file.read_ids(begin, end), pa.string())
                write(frame_lines(ids, scorer.score(*parts, sizes=sizes)[SCORES]))
        return len(file)


def _head_for(file: Embeddings, path: Path, matrices: tuple[str, ...]) -> Head:
    head, widths = load_head(path), tuple(file.rows(name, 0, 0).shape[1] for name in matrices)
    if not head.fits(widths):
        given = " and ".join(map(str, widths))
        raise MismatchError(
            f"head {path.name} takes {head.takes}, but the embeddings are {given} wide. Use the head trained on these models."
        )
    if isinstance(head, ContigHead) and SIZES not in file:
        raise UsageError(
            "the head scores the longest ORFs and needs their 'sizes', which these embeddings lack. Give the "
            "embeddings.h5 of a predict run."
        )
    return head


def _matrices_of_both_models(file: Embeddings) -> tuple[str, ...]:
    missing = [name for name in VECTOR_DATASETS.values() if name not in file]
    if missing and FEATURES in file:
        return (FEATURES,)
    if missing:
        raise UsageError(
            f"{file.path} has no {' and no '.join(missing)} embeddings. Give the embeddings.h5 of a "
            "predict run that was made without --embeddings none."
        )
    return tuple(VECTOR_DATASETS.values())


def _finite_rows(file: Embeddings, name: str, begin: int, end: int) -> npt.NDArray[Any]:
    values = file.rows(name, begin, end)
    is_finite = np.isfinite(values).all(axis=1)
    if not is_finite.all():
        row = begin + int(is_finite.argmin())
        raise DamagedFileError(
            f"embeddings file {file.path}: row {row} of {name!r} contains non-finite values: recreate the file."
        )
    return values
