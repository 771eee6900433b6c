"""Every error that virnuc raises on purpose, and what each one means for the process.

    VirnucError                      exit 1   something went wrong that is not one of the below
    ├── UsageError                   exit 2   a flag, parameter or environment variable is wrong
    ├── InputError                   exit 3   a sequence file cannot be read or holds nothing usable
    ├── MismatchError                exit 4   a run folder was made with another input, model or setting
    ├── CheckpointError              exit 4   model weights, a head or a tokenizer cannot be used
    ├── DamagedFileError             exit 4   a file that virnuc wrote is not whole any more
    ├── DeviceError                  exit 5   a device is missing or cannot do what was asked
    │   └── DeviceMemoryError        exit 5   a device ran out of memory (retryable)
    └── LaneError                    exit 5   the process behind a lane died (retryable)

Each message says what is wrong, where, and what to do. `retryable` tells an orchestrator whether doing
the same thing again can help. All of them survive pickling, so they cross process borders whole.
"""

from typing import ClassVar


class VirnucError(Exception):
    """Base of all errors raised on purpose; carries one complete, human-readable message."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


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
    """A device ran out of memory; the work may fit after other processes have freed some."""

    retryable = True


class LaneError(VirnucError):
    """The process that worked for a lane ended without finishing its shards."""

    exit_code = 5
    retryable = True
