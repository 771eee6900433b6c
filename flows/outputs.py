"""Checks of input and output paths before any work is done."""

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tasks.artifacts import in_flow
from virnuc_core.errors import InputError, UsageError
from virnuc_core.models.catalogue import BUNDLED_HEADS, find_entries
from virnuc_core.remote import is_url, require_shared_staging
from virnuc_core.results.run_opening import is_plan, recorded_names
from virnuc_core.run_folder import EMBED_SUFFIX, RunFolder
from virnuc_core.settings import LaneMode


def absolute_path(name: str) -> str:
    """Makes the path of a model or head absolute, for processes in other folders; names stay as they are."""
    path = os.path.expanduser(name)
    is_name = name in BUNDLED_HEADS or find_entries(name, None)  # names take precedence over paths
    return name if is_name or not os.path.exists(path) else os.path.abspath(path)


def require_no_input(out: Path, inputs: Iterable[str]) -> None:
    """Raises UsageError if an output is one of its inputs, under any path to it."""
    for name in inputs:
        path = Path(name)
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(f"output {out} is the input {name}: choose another --out.")


def is_embeddings_file(path: Path) -> bool:
    """Whether a file is one of vectors that virnuc wrote."""
    from virnuc_core.checked_hdf5 import recognise_hdf5  # imports HDF5

    return recognise_hdf5(path) == "embeddings file"


def require_replaceable(out: Path, is_own: Callable[[Path], bool], kind: str, *, force: bool) -> None:
    """Raises UsageError if the output file of a run is there already and may be lost.

    It may be replaced if it is of the run in the folder beside it, or if it is of the `kind` that `is_own` recognises and
    `force` is given.
    """
    if not os.path.lexists(out):
        return
    folder = RunFolder(Path(f"{out}{EMBED_SUFFIX}"))
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


def require_run(root: Path) -> None:
    """Raises InputError unless the folder holds a planned run."""
    if not RunFolder(root).plan.exists():
        raise InputError(
            f"{root} is no folder of a run: it has no plan.json. Give the --out of a `virnuc predict`."
        )


def require_places(inputs: Iterable[str], out: str, mode: LaneMode) -> None:
    """Checks paths as `require_absolute`; for URLs in mode pool, UsageError unless VIRNUC_STAGING names a folder."""
    names = [*inputs, out]
    require_absolute(*itertools.filterfalse(is_url, names))
    if mode == "pool" and (urls := list(filter(is_url, names))):
        require_shared_staging(urls[0])


def require_absolute(*paths: str) -> None:
    """Raises UsageError for URLs, and for relative paths in a run of a deployment: it runs in its worker's folder."""
    if urls := list(filter(is_url, paths)):
        raise UsageError(f"{urls[0]} is a URL: here only paths can be given.")
    relative = [path for path in paths if not Path(path).is_absolute()]
    if relative and _is_deployed():
        raise UsageError(
            f"{', '.join(relative)}: a deployed run has no folder of its own, so give absolute paths."
        )


def _is_deployed() -> bool:
    """Whether this is a run of a deployment."""
    if not in_flow():
        return False
    from prefect.runtime import deployment

    return deployment.id is not None
