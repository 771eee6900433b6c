"""Checks of input and output paths before any work is done."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from tasks.artifacts import is_deployed
from virnuc_core.errors import UsageError
from virnuc_core.models.catalogue import BUNDLED_HEADS, find_entries
from virnuc_core.remote import is_url, require_shared_staging
from virnuc_core.settings import LaneMode


def absolute_path(name: str) -> str:
    """Makes the path of a model or head absolute, for processes in other folders; names stay as they are."""
    path = os.path.expanduser(name)
    is_name = name in BUNDLED_HEADS or find_entries(name, None)  # names take precedence over paths
    return name if is_name or not os.path.exists(path) else os.path.abspath(path)


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
    if relative and is_deployed():
        raise UsageError(
            f"{', '.join(relative)}: a deployed run has no folder of its own, so give absolute paths."
        )
