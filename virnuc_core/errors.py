"""Every error that virnuc raises on purpose, and what each one means for the process.

    VirnucError                      exit 1   something went wrong that is not one of the below
    ├── UsageError                   exit 2   a flag, parameter or environment variable is wrong
    ├── InputError                   exit 3   a sequence file cannot be read or holds nothing usable
    ├── MismatchError                exit 4   a run folder was made with another input, model or setting
    ├── CheckpointError              exit 4   model weights, a head or a tokenizer cannot be used
    ├── DamagedFileError             exit 4   a file that virnuc wrote is not whole any more
    ├── DeviceError                  exit 5   a device is missing or cannot do what was asked
    │   ├── DeviceMemoryError        exit 5   a device or its host ran out of memory (retryable)
    │   └── DeviceLostError          exit 5   a device failed, or is not there any more (retryable)
    ├── LaneError                    exit 5   the process behind a lane died (retryable)
    └── StorageError                 exit 6   a file or folder of virnuc's own cannot be read or written
        └── StorageLostError         exit 6   a disk or a network file system failed (retryable)

Each message says what is wrong, where, and what to do. All of them survive pickling, so they cross process
borders whole. `is_retryable` tells an orchestrator whether doing the same thing again can help, also for the errors
of the operating system, and `storage_error` puts those into words.
"""

import errno
import os
from typing import ClassVar, Final

from virnuc_core.plain_text import visible

# A disk, a network file system or a connection that may answer the next time; a full disk or a missing file will not.
_TRANSIENT_ERRNOS: Final = frozenset(
    {
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH),
    }
)
_GO_ON: Final = "then run the same command again: what is finished is kept."
_ADVICE: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), f"Make room there, {_GO_ON}"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), f"See to it that you may read and write there, {_GO_ON}"
    ),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.ELOOP),
        "It was taken away while it was in use: put it back, or run the same command again to make it anew.",
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), f"Allow more open files (ulimit -n), {_GO_ON}"),
    **dict.fromkeys(
        _TRANSIENT_ERRNOS,
        f"The disk or network file system does not work as it should: see the system's log, {_GO_ON}",
    ),
}


class VirnucError(Exception):
    """Base of all errors raised on purpose; carries one complete, human-readable message.

    What the message quotes from a file does no harm to a terminal or a log.
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class UsageError(VirnucError):
    """A flag, parameter or environment variable has a value that cannot be used."""

    exit_code = 2


class InputError(VirnucError):
    """A sequence input is missing, unreadable, damaged, or holds no usable record."""

    exit_code = 3


class MismatchError(VirnucError):
    """A run folder belongs to another input, model or setting than the one asked for."""

    exit_code = 4


class CheckpointError(VirnucError):
    """Model weights, a classifier head or a tokenizer cannot be found, read or used."""

    exit_code = 4


class DamagedFileError(VirnucError):
    """A shard, embeddings file or frame store is truncated, altered or of another schema."""

    exit_code = 4


class DeviceError(VirnucError):
    """A compute device is missing or does not support what was asked of it."""

    exit_code = 5


class DeviceMemoryError(DeviceError):
    """A device or its host ran out of memory; the work may fit after other processes have freed some."""

    retryable = True


class DeviceLostError(DeviceError):
    """A device failed at work or has vanished; another one, or a new process on the same, may do it."""

    retryable = True


class LaneError(VirnucError):
    """The process that worked for a lane ended without finishing its shards."""

    exit_code = 5
    retryable = True


class StorageError(VirnucError):
    """A file or folder of virnuc's own cannot be read or written: no room, no permission, or it has vanished."""

    exit_code = 6


class StorageLostError(StorageError):
    """A disk or a network file system failed at work; it may answer the next time."""

    retryable = True


def storage_error(error: OSError) -> StorageError:
    """What an error of the operating system means for a person; retryable if it is."""
    kind = StorageLostError if is_retryable(error) else StorageError
    reason = os.strerror(error.errno) if error.errno else str(error)
    advice = _ADVICE.get(error.errno or 0, f"See what is the matter there, {_GO_ON}")
    return kind(f"{error.filename or 'a file of the run'} cannot be read or written: {reason}. {advice}")


def is_retryable(error: BaseException) -> bool:
    """Whether doing the same thing again can help."""
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT_ERRNOS
    return isinstance(error, VirnucError) and error.retryable
