"""Who works in a run's folder, and what of an earlier run is thrown away."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from virnuc_core.errors import UsageError
from virnuc_core.run_plan import RunFolder

LOCK_NAME = ".virnuc.lock"


@contextmanager
def open_run_folder(root: Path, *, force: bool) -> Iterator[RunFolder]:
    """Makes the folder where needed and keeps every other run out of it.

    Args:
        root: the run's folder.
        force: delete what an earlier run wrote there; files that virnuc does not write are left alone.

    Raises:
        UsageError: the path is not a folder, cannot be written, or another run works there.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / LOCK_NAME).open("w")
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--out {root} is not a folder: choose another name.") from error
    except PermissionError as error:
        raise UsageError(
            f"--out {root} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    # The lock ends with the process, however that ends.
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another run works in {root}: wait for it, or choose another --out.") from error
        folder = RunFolder(root)
        if force:
            _empty(folder)
        yield folder


def _empty(folder: RunFolder) -> None:
    # The plan goes last: as long as it is there, a run that was killed in between still knows what it was.
    for path in (folder.shards, folder.frames):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*result_files(folder), folder.plan):
        path.unlink(missing_ok=True)


def result_files(folder: RunFolder) -> tuple[Path, ...]:
    """What a finished run leaves for its user."""
    return (
        folder.predictions,
        folder.contigs,
        folder.prediction_results,
        folder.highest_score,
        folder.embeddings,
        folder.rejected,
        folder.report,
    )
