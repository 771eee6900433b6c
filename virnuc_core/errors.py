"""All errors that virnuc raises on purpose, with the exit code of the process.

    VirnucError                      exit 1   anything not listed below
    ├── UsageError                   exit 2   invalid flag, parameter or environment variable
    ├── InputError                   exit 3   sequence file unreadable, or without usable records
    │   └── UnreadableInputError     exit 3   its disk, path or permissions are at fault, not its content
    ├── MismatchError                exit 4   run folder of another input, model or setting
    ├── CheckpointError              exit 4   model weights, head or tokenizer unusable
    ├── DamagedFileError             exit 4   corrupt or incomplete file that virnuc wrote
    ├── DeviceError                  exit 5   device missing or unsupported
    │   ├── DeviceMemoryError        exit 5   device or host out of memory (retryable)
    │   └── DeviceLostError          exit 5   device failed or disappeared (retryable)
    ├── LaneError                    exit 5   lane process died (retryable)
    ├── CancelledRunError            exit 5   somebody cancelled the run at the Prefect server
    ├── HostError                    exit 5   host not fit for the job, another one may be (retryable)
    └── StorageError                 exit 6   file or folder of virnuc's own unreadable or unwritable
        └── StorageLostError         exit 6   disk or network file system failed (retryable)

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


class CancelledRunError(VirnucError):
    """The flow run was cancelled, or ended in another way, at the Prefect server."""

    exit_code = 5


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
    go_on = "then run the same command again: finished work is kept."
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            advice = f"Free up space there, {go_on}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            advice = f"Check your permissions there, {go_on}"
        case errno.ENOENT | errno.ENOTDIR | errno.ELOOP:
            advice = "It was removed while in use: restore it, or run the same command again to recreate it."
        case errno.EMFILE | errno.ENFILE:
            advice = f"Allow more open files (ulimit -n), {go_on}"
        case number if number in _TRANSIENT_ERRNOS:
            advice = f"The disk or network file system is failing: check the system log, {go_on}"
        case _:
            advice = f"Check the path, {go_on}"
    kind = StorageLostError if is_retryable(error) else StorageError
    reason = os.strerror(error.errno) if error.errno else str(error)
    return kind(f"{error.filename or 'a file of the run'} cannot be read or written: {reason}. {advice}")


def is_retryable(error: BaseException) -> bool:
    """Whether a retry can succeed, for virnuc's errors and OSError."""
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT_ERRNOS
    return isinstance(error, VirnucError) and error.retryable
