"""Opens a run's folder: what is in it must be of a run, and nothing of it may lie elsewhere; locking, and recovery after a kill."""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

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
_PLAN_FIELDS: Final = frozenset({"schema_version", "fingerprint", "virnuc_version", "shards"})
_NAMED: Final = 5  # at most, in messages


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
        require_inside(root, OWN_NAMES)
        require_no_own_file(root, OWN_NAMES, inputs)
        require_none(_foreign(folder), root)
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
        require_inside(root, names)
        require_no_own_file(root, names, inputs)
        if not is_plan(RunFolder(root / EVALUATED_RUN).plan):
            require_none(filter(os.path.lexists, (root / name for name in EVALUATION_FILES)), root)
            if not (root / LOCK_NAME).exists():
                require_none(sequences.glob("genbank_*"), root)
    with locking(root):
        yield


@contextmanager
def locking(root: Path) -> Iterator[None]:
    """Creates the folder if needed and holds its lock; raises UsageError if that cannot be done."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open_lock(root / LOCK_NAME)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--out {root} is not a folder: choose another name.") from error
    except OSError as error:
        raise UsageError(
            f"--out {root} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    except ValueError as error:
        raise UsageError(f"--out {str(root)!r} can be the name of no folder: {error}.") from error
    # The lock is released when the process ends, even if killed.
    with lock:
        if not try_lock(lock):
            raise UsageError(f"another run works in {root}: wait for it, or choose another --out.")
        yield


def is_plan(path: Path) -> bool:
    """Whether a file is a plan that virnuc wrote, of any version, altered or not."""
    try:
        return parse_object(path.read_bytes()).keys() >= _PLAN_FIELDS
    except (OSError, ValueError):
        return False


def recorded_names(report: Path) -> frozenset[str]:
    """Names of the result files that a run.json lists; empty if it cannot be read."""
    try:
        return frozenset(str(file["name"]) for file in parse_object(report.read_bytes())["files"])
    except (OSError, ValueError, LookupError, TypeError):
        return frozenset()


def require_no_own_file(root: Path, names: Collection[str], inputs: Iterable[str]) -> None:
    """Raises UsageError if an input, under any path to it, is one of the files and folders `names` in a folder, or in one."""
    place = Path(os.path.realpath(root))
    taken = []
    for name in inputs:
        path = Path(os.path.realpath(name))
        if path != place and path.is_relative_to(place) and path.relative_to(place).parts[0] in names:
            taken.append(name)
    if taken:
        raise UsageError(
            f"--out {root}: {listed(taken)} is the input, and a run writes under that name there. Choose another --out."
        )


def require_none(foreign: Iterable[Path], root: Path) -> None:
    """Raises UsageError, naming them, if there are files of other origin where a run would write."""
    if found := list(foreign):
        raise UsageError(
            f"--out {root}: {listed(found)} would be overwritten, and no run of virnuc made what is there. Move it, or choose "
            "another --out."
        )


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
    if out.is_file() and is_plan(folder.plan) and (out.name in recorded_names(folder.report) or is_own(out)):
        return
    if not (out.is_file() and is_own(out)):
        raise UsageError(
            f"--out {out} is there already, and is no {kind} of virnuc: move it, or choose another --out."
        )
    if not force:
        raise UsageError(
            f"--out {out} is there already, and is not of a run in {folder.root}: choose another --out, or give --force to "
            "replace it."
        )


def require_head_name(out: Path) -> None:
    """Raises UsageError unless the suffix is that by which heads are recognized."""
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {out} must end in .safetensors: that is how a head is stored.")


def require_head_place(head: Path, inputs: Sequence[str], *, force: bool) -> None:
    """Raises UsageError unless a head and its card can be written to `head` without loss."""
    require_head_name(head)
    card = card_of(head)
    for written in (head, card):
        require_no_input(written, inputs)
    require_replaceable(head, is_own_head, "head", force=force)
    if not head.exists() and not is_plan(RunFolder(run_folder_of(head)).plan):
        require_none(filter(os.path.lexists, [card]), head)


def listed(names: Collection[str | Path]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(map(str, list(names)[:_NAMED]))}{more}"


def require_inside(root: Path, names: Collection[str]) -> None:
    """Raises UsageError if a file or folder of these `names`, or anything in one, is a link that leads out of the folder."""
    place = Path(os.path.realpath(root))
    own = {*names, LOCK_NAME}
    leading_out = []
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name in own or temporary_of(entry.name) in own:
                leading_out += [path for path in _links(entry) if not path.resolve().is_relative_to(place)]
    if leading_out:
        raise UsageError(
            f"{listed(leading_out)}: a link that leads out of the run folder, and a run would read, write or delete what is "
            "there. Remove the link, or choose another --out."
        )


def _links(entry: "os.DirEntry[str]") -> Iterator[Path]:
    """The symbolic links among a file or folder and all that it holds."""
    if entry.is_symlink():
        yield Path(entry.path)
    elif entry.is_dir():
        with os.scandir(entry.path) as entries:
            for inner in entries:
                yield from _links(inner)


def _foreign(folder: RunFolder) -> Iterator[Path]:
    """What lies under the names of a run, but was not written by one.

    A plan makes the names of the results a run's, once there is run.json only those that it lists. Before a plan there are
    frames and rejected.tsv, known by their content, and files in folders that are a run's if one has locked the folder.
    """
    is_run = is_plan(folder.plan)
    recorded = recorded_names(folder.report) or {path.name for path in folder.results}
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
            folder.flow_run.name,
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
