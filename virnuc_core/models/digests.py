"""SHA-256 of model files, kept in VIRNUC_HOME: a file of 11 GB takes many seconds to hash, and lanes start often.

The name of a digest identifies a file and its last change, so that none is found for a changed file. They are not kept
beside the files: folders of models may be read-only, or written by other accounts, which could plant digests there.
"""

import hashlib
import logging
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from virnuc_core.env_config import home_folder
from virnuc_core.files import write_text

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# File systems count time in steps of up to 2 s: a second change within one may leave the times as they are.
_CLOCK_STEP_NS: Final = 2_000_000_000

_log = logging.getLogger(__name__)


def digest_folder() -> Path:
    """Where digests are kept; it may be deleted at any time."""
    return home_folder() / "digests"


def kept_digest(path: Path) -> str:
    """SHA-256 (hex) of a file, which is read only if none is kept of it as it is now."""
    with path.open("rb") as file:  # NFS reports changes by other hosts when a file is opened
        place = _place(os.fstat(file.fileno()))
    with suppress(OSError, UnicodeDecodeError):
        kept = place.read_text(encoding="ascii")
        if _SHA256.fullmatch(kept):
            return kept
    return new_digest(path)


def new_digest(path: Path) -> str:
    """SHA-256 (hex) of a file, which is read; kept unless the file has changed just now."""
    begun = time.time_ns()
    with path.open("rb") as file:
        place = _place(status := os.fstat(file.fileno()))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        is_settled = max(status.st_mtime_ns, status.st_ctime_ns) < begun - _CLOCK_STEP_NS
        if not is_settled or place != _place(os.fstat(file.fileno())):
            return digest
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, digest, shared=True)
    except OSError as error:
        _log.info("the hash of %s is not kept: %s", path, error)
    return digest


def _place(status: os.stat_result) -> Path:
    """The name of a digest: the file, and its state. The time of change, unlike that of modification, cannot be set."""
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return digest_folder() / "-".join(format(number, "x") for number in identity)
