"""Retention: removes what finished runs no longer need, and old files of the home folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from virnuc_core.env_config import env
from virnuc_core.errors import DamagedFileError, UsageError
from virnuc_core.files import parse_object
from virnuc_core.results.run_json import CLEANED, read_records, write_document
from virnuc_core.results.run_opening import SHARD_FILES, locking
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta

_LOCKS: Final = (".lock", "lock")


class CacheEntry(NamedTuple):
    """A folder and its direct files, removed together."""

    last_used: float
    folder: Path
    files: list[Path]
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """A run or a folder of caches; `num_bytes` are freed unless there is a reason why it is kept."""

    path: Path
    num_bytes: int = 0
    kept_because: str = ""

    @property
    def line(self) -> str:
        """As text."""
        return f"{self.path}: {self.kept_because or f'{self.num_bytes / 1e9:.3f} GB'}"


def clean_runs(folder: Path, before: datetime, *, dry_run: bool) -> Iterator[Cleaned]:
    """Removes frames and shards of the runs in a folder, or in its subfolders, that finished before a moment.

    Results, plan, journals and logs stay. A run that is unfinished, in use or being reprocessed is kept, and so is one
    whose results are not all there.
    """
    for path, names, files in os.walk(folder):
        names.sort()
        if RunFolder(Path(path)).plan.name in files:
            names.clear()
            run = RunFolder(Path(path))
            try:
                with locking(run.root):
                    yield from _clean_run(run, before, dry_run=dry_run)
            except (UsageError, DamagedFileError, OSError) as error:
                yield Cleaned(path=run.root, kept_because=str(error))


def clean_home(before: datetime, *, dry_run: bool) -> Iterator[Cleaned]:
    """Removes what was last used before a moment: staged inputs, logs of `virnuc up`.

    Also cleans staged runs.
    """
    home = env().home
    staging = env().staging or home / "staging"
    for cache in (home / "up", staging / "inputs"):
        for entry in _iter_entries(cache):
            if entry.last_used < before.timestamp():
                yield _remove_entry(cache, entry, dry_run=dry_run)
    yield from clean_runs(staging / "outputs", before, dry_run=dry_run)


def _clean_run(run: RunFolder, before: datetime, *, dry_run: bool) -> Iterator[Cleaned]:
    if not run.report.exists():
        yield Cleaned(path=run.root, kept_because="not finished")
        return
    document = _read(run.report)
    if datetime.fromisoformat(document["finished"]) >= before:
        return
    if any(folder.previous is not None for folder in (run.next, run.incoming)):
        yield Cleaned(path=run.root, kept_because="being reprocessed")
    elif missing := _missing_results(run, document["kind"]):
        yield Cleaned(path=run.root, kept_because=f"{missing} is not as it was when the run finished")
    elif num_bytes := sum(path.stat().st_size for path in _removable(run)):
        if not dry_run:
            # First, so that a run is never without shards and a reason.
            now = datetime.now(UTC).isoformat(timespec="seconds")
            write_document(run.report, {**document, CLEANED: now})
            for path in _removable(run):
                path.unlink()
            _drop_empty(run.shards)
            _drop_empty(run.frames)
        yield Cleaned(path=run.root, num_bytes=num_bytes)


def _read(report: Path) -> dict[str, Any]:
    try:
        document = parse_object(report.read_bytes())
        datetime.fromisoformat(document["finished"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{report} cannot be read ({error!r})") from error
    return document


def _missing_results(run: RunFolder, kind: str) -> str:
    """The first result that is missing or of another size than recorded, "" if there is none."""
    for name, record in read_records(run.report).items():
        path = run.root / name if kind == "predict" else run.embedded
        if not path.is_file() or path.stat().st_size != record.size:
            return str(path)
    return ""


def _removable(run: RunFolder) -> list[Path]:
    shards = [path for pattern in SHARD_FILES for path in run.shards.glob(pattern)]
    frames = sorted(run.frames.iterdir()) if StoreMeta.is_in(run.frames) else []
    frames.sort(key=StoreMeta.is_mark)  # last, since without it the folder is no frame store
    return [path for path in (*shards, *frames) if path.is_file()]


def _drop_empty(folder: Path) -> None:
    with suppress(OSError):  # somebody's own files, or no folder
        folder.rmdir()


def _remove_entry(cache: Path, entry: CacheEntry, *, dry_run: bool) -> Cleaned:
    with ExitStack() as stack:
        for lock in {parent / name for parent in (cache, entry.folder) for name in _LOCKS}:
            if lock.exists():
                try:
                    fcntl.flock(stack.enter_context(lock.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return Cleaned(path=entry.folder, kept_because="in use")
        if not dry_run:
            for file in entry.files:
                if file.name not in _LOCKS:
                    file.unlink(missing_ok=True)
            _drop_empty(entry.folder)
    return Cleaned(path=entry.folder, num_bytes=entry.size)


def _iter_entries(cache: Path) -> Iterator[CacheEntry]:
    """All of a folder but empty files, which are locks; other processes may be changing it."""
    for folder, _, names in os.walk(cache):
        found: list[tuple[Path, os.stat_result]] = []
        for name in names:
            with suppress(FileNotFoundError):  # another process has just removed it
                found.append((path := Path(folder, name), path.stat()))
        if size := sum(status.st_size for _, status in found):
            last_used = max(max(status.st_atime, status.st_mtime) for _, status in found)
            yield CacheEntry(last_used, Path(folder), [path for path, _ in found], size)
