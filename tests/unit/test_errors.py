import errno
import pickle

import pytest

from virnuc_core.errors import DeviceMemoryError, InputError, LaneError, VirnucError, is_retryable


@pytest.mark.parametrize(
    ("error", "can_help"),
    [
        (LaneError("the process died"), True),
        (DeviceMemoryError("full"), True),
        (InputError("no such file"), False),
        (VirnucError("unknown"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (OSError("without a number"), False),
        (MemoryError(), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_can_be_tried_again(error: BaseException, can_help: bool) -> None:
    assert is_retryable(error) is can_help
    assert is_retryable(pickle.loads(pickle.dumps(error))) is can_help
