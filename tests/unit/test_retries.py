"""What is tried again, how often, and what ends the wait."""

import errno
import threading
import time
from collections.abc import Callable

import pytest

from virnuc_core import retries
from virnuc_core.errors import InputError, LaneError, StorageError, StorageLostError, VirnucError
from virnuc_core.retries import is_repeated, retrying


def failing(*errors: Exception) -> tuple[Callable[[], str], list[Exception]]:
    """A function that fails with each of these errors once, and those that are left."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call, left


def stale() -> OSError:
    return OSError(errno.ESTALE, "Stale file handle", "shards")


def test_storage_is_waited_for_for_ten_minutes_and_other_errors_three_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert [is_repeated("embed", LaneError("died"), tries) for tries in (1, 3, 4)] == [True, True, False]
    most = len(retries.DELAYS_SECONDS)
    lost = StorageLostError("shard_00042.h5 cannot be read or written: Stale file handle.")
    assert [is_repeated("embed", lost, tries) for tries in (4, most, most + 1)] == [True, True, False]
    assert sum(retries.DELAYS_SECONDS) >= 600
    assert "retrying embed in 60 s: shard_00042.h5 cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        (stale, StorageLostError, 4),
        (lambda: LaneError("died"), LaneError, 4),
        (lambda: OSError(errno.ENOSPC, "it failed", "table.tsv"), StorageError, 1),
        (lambda: InputError("no such file"), InputError, 1),
        (lambda: KeyError("unexpected"), KeyError, 1),
    ],
)
def test_a_call_fails_with_its_last_error(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], kind: type[Exception], tries: int
) -> None:
    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0, 0.0, 0.0))
    call, left = failing(*(error() for _ in range(9)))
    with pytest.raises(kind) as caught:
        retrying("read", call)
    assert type(caught.value) is kind
    assert len(left) == 9 - tries


def test_a_call_that_succeeds_at_last_gives_its_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "DELAYS_SECONDS", (0.0, 0.0))
    call, _ = failing(stale(), stale())
    assert retrying("read", call) == "done"
    assert caplog.text.count("retrying read in 0 s: shards cannot be read") == 2


@pytest.mark.parametrize("is_set_before", [True, False])
def test_nothing_is_tried_again_once_it_is_to_stop(is_set_before: bool) -> None:
    stopping = threading.Event()
    call, left = failing(*(LaneError("died") for _ in range(3)))
    setter = threading.Timer(0.0 if is_set_before else 0.2, stopping.set)
    if is_set_before:
        stopping.set()
    setter.start()
    begin = time.monotonic()
    with pytest.raises(VirnucError, match="died"):
        retrying("lane 0", call, stopping)
    setter.join()
    assert time.monotonic() - begin < 1.9
    assert len(left) == 2, "called once more after it was to stop"
