"""Whether a run's folder is whole: every part of it against the plan, and the results against the shards."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from virnuc_core.atomic_write import iter_temporaries
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.shard import missing_shards, read_shard, shard_identity
from virnuc_core.results.aggregate import shard_columns
from virnuc_core.results.embeddings_file import EmbeddingsFile
from virnuc_core.results.result_files import FileRecord, read_records
from virnuc_core.results.tables import differing_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import RunPlan, Shard, read_plan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.store_meta import content_digest

State = Literal["whole", "damaged", "missing", "foreign", "unfinished", "left over"]
# What a run is not whole with; the others do no harm.
BAD: Final[frozenset[State]] = frozenset({"damaged", "missing", "foreign", "unfinished"})
_AGAIN: Final = "run the same command again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found of one file or folder.

    Attributes:
        path: which.
        state: how it is.
        message: why, and what to do; "" when it is whole.
    """

    path: Path
    state: State
    message: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether the run is not whole with it."""
        return self.state in BAD


def check_run(folder: RunFolder, *, thorough: bool) -> Iterator[Finding]:
    """Looks at every file of a run.

    Args:
        folder: the run's folder, with a plan.
        thorough: compare the results with what the shards give, row by row; otherwise only with the checksums that were
            taken when they were written.
    """
    if folder.incoming.previous is not None:
        yield Finding(
            path=folder.incoming.root,
            state="unfinished",
            message=f"{folder.incoming.root}: a new run is being put in the place of this one, and that was stopped. Run "
            "`virnuc reprocess` or `virnuc predict` again: it goes on with it.",
        )
        return
    try:
        plan = read_plan(folder.plan)
    except DamagedFileError as error:
        yield Finding(path=folder.plan, state="damaged", message=str(error))
        return
    yield Finding(path=folder.plan, state="whole")
    store = yield from _check_store(folder, plan)
    whole = yield from _check_shards(folder, plan)
    yield from _check_results(folder, plan)
    if thorough and store is not None:
        yield from _check_against_shards(folder, plan, store, whole)
    yield from _left_overs(folder)


def check_shard(path: Path, plan: RunPlan, shard: Shard) -> Finding:
    """Reads all of one shard and compares it with its plan."""
    if not path.exists():
        return Finding(path=path, state="missing", message=f"{path} is still to be computed: {_AGAIN}.")
    try:
        read_shard(path, shard_identity(plan, shard))
    except DamagedFileError as error:
        advice = f"{error} The same command sets it aside and does so."
        return Finding(path=path, state="damaged", message=advice)
    except MismatchError as error:
        return Finding(path=path, state="foreign", message=str(error))
    return Finding(path=path, state="whole")


def _check_store(folder: RunFolder, plan: RunPlan) -> Generator[Finding, None, FrameStore | None]:
    """Gives the store when it is whole."""
    path = folder.frames
    try:
        store = FrameStore.open(path)
    except DamagedFileError as error:
        state: State = "damaged" if path.exists() else "missing"
        yield Finding(path=path, state=state, message=str(error))
        return None
    if content_digest(path) != store.meta.content_sha256:
        message = f"the columns of {path} were altered after they were written: delete it and run again."
        yield Finding(path=path, state="damaged", message=message)
        return None
    if store.meta.content_sha256 != plan.input_digest:
        message = f"{path} holds other sequences than the run was planned for: delete it and run again."
        yield Finding(path=path, state="foreign", message=message)
        return None
    yield Finding(path=path, state="whole")
    return store


def _check_shards(folder: RunFolder, plan: RunPlan) -> Generator[Finding, None, tuple[Shard, ...]]:
    """Gives the shards that are whole."""
    whole: list[Shard] = []
    missing: list[str] = []
    for shard in plan.shards:
        found = check_shard(folder.shard(shard.index), plan, shard)
        if found.state == "whole":
            whole.append(shard)
        if found.state == "missing":
            missing.append(found.path.name)
        else:
            yield found
    if missing:
        message = f"{len(missing)} of {len(plan.shards)} shards are still to be computed ({missing[0]}...): {_AGAIN}."
        yield Finding(path=folder.shards, state="missing", message=message)
    planned = {folder.shard(shard.index).name for shard in plan.shards}
    for path in sorted(folder.shards.glob("shard_*.h5")):
        if path.name not in planned:
            message = (
                f"{path} is not of this run, which has {len(planned)} shards; nothing reads it: delete it."
            )
            yield Finding(path=path, state="foreign", message=message)
    return tuple(whole)


def _check_results(folder: RunFolder, plan: RunPlan) -> Iterator[Finding]:
    """Compares the results with what run.json says of them, and vectors with their own checksums."""
    results = folder.results if plan.kind == "predict" else (folder.embedded, folder.report)
    records: dict[str, FileRecord] = {}
    if folder.report.exists():
        try:
            records = read_records(folder.report)
            yield Finding(path=folder.report, state="whole")
        except DamagedFileError as error:
            yield Finding(path=folder.report, state="damaged", message=str(error))
    for path in results:
        if not path.exists():
            yield Finding(path=path, state="missing", message=f"{path} is missing: {_AGAIN}.")
        elif path != folder.report:
            yield _check_result(path, plan, records.get(path.name), is_recorded=bool(records))


def _check_result(path: Path, plan: RunPlan, record: FileRecord | None, *, is_recorded: bool) -> Finding:
    try:
        if path.suffix == ".h5":
            with EmbeddingsFile(path) as file:
                file.require_plan(plan)
                file.verify()
    except DamagedFileError as error:
        return Finding(path=path, state="damaged", message=str(error))
    except MismatchError as error:
        return Finding(path=path, state="foreign", message=str(error))
    if is_recorded and record != FileRecord.of(path):
        message = f"{path} is not as it was when run.json was written: {_AGAIN}."
        return Finding(path=path, state="damaged", message=message)
    return Finding(path=path, state="whole")


def _check_against_shards(
    folder: RunFolder, plan: RunPlan, store: FrameStore, whole: tuple[Shard, ...]
) -> Iterator[Finding]:
    """Compares every row of the vectors with the shards, and every byte of the tables with what follows from them."""
    if plan.kind == "train":
        return  # a head is no row of vectors
    embeddings = folder.embeddings if plan.kind == "predict" else folder.embedded
    try:
        with EmbeddingsFile(embeddings) as file:
            file.require_plan(plan)
            differing = [row for shard in whole for row in _other_rows(folder, plan, store, file, shard)]
    except (DamagedFileError, MismatchError):
        return  # said already
    for message in differing:
        yield Finding(path=embeddings, state="damaged", message=f"{message}: {_AGAIN}.")
    if plan.kind != "predict" or differing or len(whole) < len(plan.shards):
        return
    for path in sorted(differing_tables(folder, store, plan.threshold)):
        message = f"{path} is not what the shards give: {_AGAIN}."
        yield Finding(path=path, state="damaged", message=message)


def _other_rows(
    folder: RunFolder, plan: RunPlan, store: FrameStore, file: EmbeddingsFile, shard: Shard
) -> Iterator[str]:
    """Says for each dataset which row of a shard is the first that the embeddings file has otherwise."""
    result = read_shard(folder.shard(shard.index), shard_identity(plan, shard))
    for name, expected in shard_columns(plan, store, shard, result).items():
        if name not in file:
            yield f"{file.path} has no {name!r}"
            continue
        found = file.rows(name, shard.begin, shard.end)
        if found.shape != expected.shape:
            yield f"{file.path}: {name!r} has another form than in {folder.shard(shard.index).name}"
            continue
        other = np.flatnonzero((found != expected).reshape(len(expected), -1).any(axis=1))
        if len(other):
            row = shard.begin + int(other[0])
            [frame] = store.frame_ids(row, row + 1)
            yield (
                f"{file.path}: {len(other)} rows of {name!r} are not as in {folder.shard(shard.index).name}, the first is "
                f"row {row} ({frame})"
            )


def _left_overs(folder: RunFolder) -> Iterator[Finding]:
    """What does no harm, and what becomes of it."""
    own = {folder.frames.name, folder.plan.name, *(path.name for path in folder.results)}
    killed = [path for path, name in iter_temporaries(folder.root) if name in own]
    killed += [path for path, _ in iter_temporaries(folder.shards)]
    for path in killed:
        message = f"{path} was left by a killed run, or a run is at work: the next run removes it."
        yield Finding(path=path, state="left over", message=message)
    for path in sorted(folder.shards.glob("shard_*.h5.damaged-*")):
        message = f"{path} was set aside, and is not read: delete it when nobody wants to look into it."
        yield Finding(path=path, state="left over", message=message)
    if folder.next.previous is not None:
        yield Finding(path=folder.next.root, state="left over", message=_next_in_words(folder.next))


def _next_in_words(following: RunFolder) -> str:
    try:
        shards = read_plan(following.plan).shards
    except DamagedFileError:
        done = "it is not planned yet"
    else:
        missing = missing_shards(following, [shard.index for shard in shards])
        done = f"{len(shards) - len(missing)} of {len(shards)} shards are there"
    return (
        f"{following.root} is the beginning of a `virnuc reprocess`: {done}. The same command goes on with it; with other "
        "settings it needs --force."
    )
