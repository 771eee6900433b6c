"""Opens a run's folder: what is in it must be of a run, and nothing of it may lie elsewhere; locking, and recovery after a kill."""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from virnuc_core.checked_hdf5 import recognise_hdf5
from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.files import (
    open_lock,
    parse_object,
    remove_temporaries,
    require_utf8,
    temporary_name,
    temporary_of,
    try_lock,
)
from virnuc_core.models.catalogue import is_own_head
from virnuc_core.results.run_json import read_records
from virnuc_core.run_folder import (
    EVALUATED_RUN,
    EVALUATION_FILES,
    OWN_NAMES,
    RunFolder,
    card_of,
    run_folder_of,
)
from virnuc_core.sequences.frame_store import StoreMeta
from virnuc_core.sequences.frame_store_build import REJECTED_HEADER

LOCK_NAME = ".virnuc.lock"


@contextmanager
def open_run_folder(root: Path, *, force: bool, inputs: Iterable[str] = ()) -> Iterator[RunFolder]:
    """Creates the folder if needed and locks it against other runs.

    Removes the temporary files of a killed run. `force` deletes what an earlier run wrote, but no files of other origin.

    Raises:
        UsageError: the path is not a folder, cannot be written, or another run is using it; it holds files under names of a
            run that no run made, or links out of it; or one of the `inputs` would be overwritten. Nothing is changed then.
    """
    folder, inputs = RunFolder(root), tuple(inputs)
    require_utf8(str(root), *inputs)
    if os.path.isdir(root):
        _require_own(root, OWN_NAMES, inputs)
        _refuse_foreign(_foreign(folder), root)
    with locking(root):
        if force:
            _empty(folder)
        remove_temporaries(folder.root, {path.name for path in (folder.plan, *folder.results)})
        yield folder


@contextmanager
def open_evaluation(root: Path, inputs: Sequence[str]) -> Iterator[None]:
    """Locks the folder of an evaluation, in which its run has one of its own; raises UsageError as `open_run_folder`."""
    require_utf8(str(root), *inputs)
    sequences = RunFolder(root).sequences
    if root.is_dir():
        names = {*EVALUATION_FILES, sequences.name, EVALUATED_RUN}
        _require_own(root, names, inputs)
        if not _is_plan(RunFolder(root / EVALUATED_RUN).plan):
            _refuse_foreign(filter(os.path.lexists, (root / name for name in EVALUATION_FILES)), root)
            if not (root / LOCK_NAME).exists():
                _refuse_foreign(sequences.glob("genbank_*"), root)
    with locking(root):
        yield


def require_no_input(out: Path, inputs: Iterable[str]) -> None:
    """Raises UsageError if an output is one of its inputs, under any path to it."""
    for name in inputs:
        path = Path(name)
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(f"output {out} is the input {name}: choose another --out.")


def is_embeddings_file(path: Path) -> bool:
    """Whether a file is one of vectors that virnuc wrote."""
    return recognise_hdf5(path) == "embeddings file"


def require_replaceable(out: Path, is_own: Callable[[Path], bool], kind: str, *, force: bool) -> None:
    """Raises UsageError if the output file of a run is there already and may be lost.

    It may be replaced if it is of the run in the folder beside it, or if it is of the `kind` that `is_own` recognises and
    `force` is given.
    """
    if not os.path.lexists(out):
        return
    folder = RunFolder(run_folder_of(out))
    is_ours = out.is_file() and is_own(out)
    is_recorded = out.is_file() and out.name in _recorded_names(folder.report)
    if _is_plan(folder.plan) and (is_ours or is_recorded):
        return
    if not is_ours:
        raise UsageError(f"--out {out} exists and is not a virnuc {kind}: move it, or choose another --out.")
    if not force:
        raise UsageError(
            f"--out {out} exists and does not belong to a run in {folder.root}: choose another --out, or replace it with --force."
        )


def require_head_place(head: Path, inputs: Sequence[str], *, force: bool) -> None:
    """Raises UsageError unless a head and its card can be written to `head` without loss."""
    if head.suffix != ".safetensors":
        raise UsageError(f"--out {head} must end in .safetensors, the format of a head.")
    card = card_of(head)
    for written in (head, card):
        require_no_input(written, inputs)
    require_replaceable(head, is_own_head, "head", force=force)
    if not head.exists() and not _is_plan(RunFolder(run_folder_of(head)).plan):
        _refuse_foreign(filter(os.path.lexists, [card]), head)


@contextmanager
def locking(root: Path) -> Iterator[None]:
    """Makes a folder, and keeps other runs out of it; UsageError where that is not possible."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open_lock(root / LOCK_NAME)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--out {root} is not a folder: choose another name.") from error
    except OSError as error:
        raise UsageError(
            f"--out {root} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    # The lock is released when the process ends, even if killed.
    with lock:
        if not try_lock(lock):
            raise UsageError(f"another run is using {root}: wait for it, or choose another --out.")
        yield


def _is_plan(path: Path) -> bool:
    """Whether a file is a plan that virnuc wrote, of any version, altered or not."""
    try:
        found = parse_object(path.read_bytes()).keys()
    except (OSError, ValueError):
        return False
    return found >= {"schema_version", "fingerprint", "virnuc_version", "shards"}


def _recorded_names(report: Path) -> Collection[str]:
    with suppress(DamagedFileError):
        return read_records(report).keys()
    return ()


def _named(paths: Iterable[str | Path]) -> str:
    """The first few names, and how many more there are; empty without any."""
    names = list(map(str, paths))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _require_own(root: Path, names: Collection[str], inputs: Iterable[str]) -> None:
    """Of the files and folders `names` in a folder, none may be or hold an input, under any path to it, or lead out of the folder."""
    place = Path(os.path.realpath(root))
    own = {*names, LOCK_NAME}
    parts = [path for path in sorted(root.iterdir()) if {path.name, temporary_of(path.name)} & own]
    links = [link for part in parts for link in _links(part)]
    if leading_out := _named(link for link in links if not link.resolve().is_relative_to(place)):
        raise UsageError(
            f"{leading_out}: a link to outside the run folder, where a run would read, write or delete files. Remove the link, "
            "or choose another --out."
        )
    read = {name: Path(os.path.realpath(name)) for name in inputs}
    if taken := _named(
        name for name, path in read.items() if {*path.parents, path} & {place / own for own in names}
    ):
        raise UsageError(f"--out {root}: a run would overwrite its input {taken}. Choose another --out.")


def _refuse_foreign(foreign: Iterable[Path], root: Path) -> None:
    if named := _named(foreign):
        raise UsageError(
            f"--out {root}: {named} would be overwritten, and was not made by virnuc. Move it, or choose "
            "another --out."
        )


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links among a file or folder and all that it holds."""
    if path.is_symlink():
        yield path
    elif path.is_dir():
        for inner in path.iterdir():
            yield from _links(inner)


def _foreign(folder: RunFolder) -> Iterator[Path]:
    """What lies under the names of a run, but was not written by one.

    A plan makes the names of the results a run's, once there is run.json only those that it lists. Before a plan there are
    frames and rejected.tsv, known by their content, and files in folders that are a run's if one has locked the folder.
    """
    is_run = _is_plan(folder.plan)
    recorded = _recorded_names(folder.report) or {path.name for path in folder.results}
    if not is_run and os.path.lexists(folder.plan):
        yield folder.plan
    for path in folder.results:
        if os.path.lexists(path) and not (
            (is_run and path.is_file() and path.name in {*recorded, folder.report.name})
            or (path == folder.rejected and _is_rejected(path))
        ):
            yield path
    is_locked = (folder.root / LOCK_NAME).exists()
    for parent, patterns in _patterns(folder).items():
        if os.path.lexists(parent) and not parent.is_dir():
            yield parent
        elif not (is_run or is_locked):
            yield from sorted(path for pattern in patterns for path in parent.glob(pattern))
    if not is_run and os.path.lexists(folder.frames):
        try:
            StoreMeta.read(folder.frames)
        except (DamagedFileError, OSError):
            yield folder.frames


def _is_rejected(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as table:
            return table.readline() == REJECTED_HEADER
    except (OSError, ValueError):
        return False


def _patterns(folder: RunFolder) -> Mapping[Path, tuple[str, ...]]:
    """What runs write in subfolders, by name, so that the user's own files there are kept."""
    return {
        folder.shards: ("shard_*.h5*", ".shard_*.tmp"),
        folder.lanes: (
            "lane-*.jsonl",
            "lane-*.log*",
            "plan-*.jsonl",
            folder.token.name,
        ),
        folder.sequences: ("genbank_*.fa", "genbank_*.tsv"),
        folder.training: ("records.tsv", "figures.json", "*.png"),
    }


def _empty(folder: RunFolder) -> None:
    for parent, patterns in _patterns(folder).items():
        for path in [path for pattern in patterns for path in parent.glob(pattern)]:
            path.unlink()
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()
    shutil.rmtree(temporary_name(folder.frames), ignore_errors=True)
    if StoreMeta.is_in(folder.frames):
        shutil.rmtree(folder.frames)
    # The plan last, so that the folder is still recognised as a run if killed in between.
    for path in (*folder.results, folder.plan):
        path.unlink(missing_ok=True)
