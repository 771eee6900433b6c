"""All errors that virnuc raises on purpose, with the exit code of the process; docs/cli.md lists them.

Messages say what is wrong, where, and what to do. All errors can be pickled, to cross process boundaries.
"""

import errno
import os
from typing import ClassVar, Final

from virnuc_core.plain_text import visible, without_secrets

# A retry may succeed, unlike for a full disk or a missing file.
_TRANSIENT_ERRNOS: Final = (
    *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH),
)


class VirnucError(Exception):
    """Base class; the message is one complete text, without secrets of URLs, and with control characters escaped."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(visible(without_secrets(message)))


class UsageError(VirnucError):
    """A flag, parameter or environment variable is invalid."""

    exit_code = 2


class InputError(VirnucError):
    """A sequence file is missing, unreadable or corrupt, or has no usable record."""

    exit_code = 3


class UnreadableInputError(InputError):
    """A sequence file cannot be read from where it is; nothing is known of its content."""


class MismatchError(VirnucError):
    """A run folder belongs to another input, model or setting."""

    exit_code = 4


class CheckpointError(VirnucError):
    """Model weights, a classifier head or a tokenizer cannot be found, read or used."""

    exit_code = 4


class DamagedFileError(VirnucError):
    """A shard, embeddings file or frame store is truncated, altered or of another schema."""

    exit_code = 4


class DeviceError(VirnucError):
    """A compute device is missing or does not support the request."""

    exit_code = 5


class DeviceMemoryError(DeviceError):
    """A device or its host ran out of memory; a retry may succeed once other processes free some."""

    retryable = True


class DeviceLostError(DeviceError):
    """A device failed or disappeared; a new process or another device may succeed."""

    retryable = True


class LaneError(VirnucError):
    """A lane's process ended before its shards were finished."""

    exit_code = 5
    retryable = True


class HostError(VirnucError):
    """This host is not fit for the job: no shared folder, another version or a full disk; another host may succeed."""

    exit_code = 5
    retryable = True


class StorageError(VirnucError):
    """A file or folder of virnuc's own cannot be read or written: disk full, no permission, or deleted."""

    exit_code = 6


class StorageLostError(StorageError):
    """A disk or network file system failed; a retry may succeed."""

    retryable = True


def storage_error(error: OSError) -> StorageError:
    """Translates an OSError into an actionable message; retryable if the OSError is."""
    kind = StorageLostError if is_retryable(error) else StorageError
    reason = os.strerror(error.errno) if error.errno else str(error)
    return kind(
        f"{error.filename or 'a file of the run'} cannot be read or written: {reason}. Check the disk, its free space "
        "and your permissions there, then run the same command again: finished work is kept."
    )


def is_retryable(error: BaseException) -> bool:
    """Whether a retry can succeed, for virnuc's errors and OSError."""
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT_ERRNOS
    return isinstance(error, VirnucError) and error.retryable
