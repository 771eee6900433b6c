"""Nearest genomes of the contigs of a run, or nearest contigs of another run, by their embeddings."""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from virnuc_core.errors import InputError, MismatchError, UsageError
from virnuc_core.inference.plan import PlannedHead, RunPlan, read_plan
from virnuc_core.results.contig_scores import contig_head_of, genome_index_of
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.nearest import RANKS, GenomeIndex, load_index
from virnuc_core.results.tables import scoring_contigs
from virnuc_core.results.writers import ResultWriter, header_line, table_lines
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import FRAMES_IN_WORDS

SCHEMA: Final = pa.schema(
    [
        ("contig", pa.string()),
        ("rank", pa.int64()),
        ("name", pa.string()),
        ("similarity", pa.float64()),
        *((rank, pa.string()) for rank in RANKS),
    ]
)


def search_run(run: Path, index: Path | None = None, top: int = 5) -> pa.Table:
    """The `top` nearest vectors of an index for each contig with a score, in input order, nearest first.

    Args:
        run: folder of a finished predict run with a head for the longest stretches.
        index: file of an index, or folder of another such run, whose contigs are then the index; None for that of the run's head.
        top: fewer if the index is smaller.

    Raises:
        CheckpointError: the index or the head cannot be read.
        DamagedFileError: a file of a run is corrupt.
        InputError: a run is not finished, or has no contig with a score to search in.
        MismatchError: the index or the other run is of another head, or a run has no embeddings of contigs.
        UsageError: no index is given, and the head has none.
    """
    folder, plan, head = _opened(run)
    genomes = _index_for(plan, head, index)
    names, embeddings = _contig_embeddings(folder, plan)
    found = genomes.search(embeddings, top)
    top = found.rows.shape[1]
    rows = found.rows.ravel().tolist()
    columns = [
        np.repeat(np.array(names, np.object_), top),
        np.tile(np.arange(1, top + 1), len(names)),
        [genomes.names[row] for row in rows],
        found.similarity.ravel().astype(np.float64),
        *([labels[row] or None for row in rows] for labels in genomes.lineages),
    ]
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


def search_lines(table: pa.Table) -> bytes:
    """A result of `search_run` as tab-separated text."""
    return header_line(SCHEMA.names) + table_lines(table, np.inf)


def write_search(table: pa.Table, out: Path) -> None:
    """Writes a result of `search_run` as a tab-separated file."""
    with ResultWriter().stream(out) as write:
        write(search_lines(table))


def _opened(root: Path) -> tuple[RunFolder, RunPlan, PlannedHead]:
    folder = RunFolder(root)
    if not folder.report.exists():
        raise InputError(
            f"{root} holds no finished run: it has no {folder.report.name}. Give the --out of a `virnuc predict`."
        )
    plan = read_plan(folder.plan)
    if plan.kind != "predict" or plan.frames != "longest" or plan.head is None:
        raise MismatchError(
            f"{root} has no embeddings of contigs: only predict runs with a head for the {FRAMES_IN_WORDS['longest']} have."
        )
    return folder, plan, plan.head


def _index_for(plan: RunPlan, head: PlannedHead, index: Path | None) -> GenomeIndex:
    if index is None:
        own = genome_index_of(plan)
        if own is None:
            raise UsageError(f"head {head.name} has no index of genomes: give --index.")
        return own
    if not index.is_dir():
        return load_index(index, head.fingerprint)
    folder, other, other_head = _opened(index)
    if other_head.fingerprint != head.fingerprint:
        raise MismatchError(
            f"{index} is a run of another head than the contigs to look up: {other_head.name} "
            f"({other_head.fingerprint[:12]}) and {head.name} ({head.fingerprint[:12]}), whose embeddings cannot be compared."
        )
    names, embeddings = _contig_embeddings(folder, other)
    if not names:
        raise InputError(f"no contig of {index} has a score: there is nothing to search in.")
    return GenomeIndex.build(embeddings, names, dict.fromkeys(RANKS, [""] * len(names)), head.fingerprint)


def _contig_embeddings(folder: RunFolder, plan: RunPlan) -> tuple[list[str], npt.NDArray[np.float32]]:
    """Names and embeddings (n, Z) of the contigs with a score, made as for the tables."""
    head, store = contig_head_of(plan), FrameStore.open(folder.frames)
    assert head is not None
    parts = [np.empty((0, head.spec.code_width), np.float32)]
    with Embeddings(folder.embeddings, own=True) as file:
        if file.attrs["plan_fingerprint"] != plan.fingerprint or len(file) != store.num_frames:
            raise MismatchError(
                f"{file.path} is not of the plan beside it. Run the command that made it again."
            )
        with scoring_contigs(head, store, file) as blocks:
            parts += [block.embedding for block in blocks]
    embeddings = np.concatenate(parts)
    rows = np.flatnonzero(~np.isnan(embeddings[:, 0]))
    names = store.record_names(0, store.num_records)
    return [names[row] for row in rows.tolist()], embeddings[rows]
