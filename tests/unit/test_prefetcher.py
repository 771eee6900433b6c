"""Work ahead in background threads: order, bounds, errors, and no leaked threads."""

import threading
import time
from collections.abc import Iterator

import pytest

from virnuc_core.prefetcher import Prefetcher

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_results_are_in_order_and_made_elsewhere() -> None:
    def double(item: int) -> tuple[int, int]:
        return 2 * item, threading.get_ident()

    with Prefetcher(double, range(7), depth=2) as results:
        doubled, threads = zip(*results, strict=True)
    assert doubled == (0, 2, 4, 6, 8, 10, 12)
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_several_threads_work_at_once_and_results_stay_in_order() -> None:
    meeting = threading.Barrier(3, timeout=10)

    def meet(item: int) -> int:
        meeting.wait()
        if item % 3 == 0:
            time.sleep(0.02)
        return item

    with Prefetcher(meet, range(9), depth=3, threads=3) as results:
        assert list(results) == list(range(9))


def test_no_more_than_asked_for_is_prefetched() -> None:
    drawn = []

    def draw() -> Iterator[int]:
        for item in range(10):
            drawn.append(item)
            yield item

    with Prefetcher(lambda item: item, draw(), depth=2) as results:
        assert drawn == [0, 1, 2]
        assert next(results) == 0
        assert drawn == [0, 1, 2]
        assert next(results) == 1
        assert drawn == [0, 1, 2, 3]


def test_an_error_comes_out_in_its_place() -> None:
    def fail_at_two(item: int) -> int:
        if item == 2:
            raise OSError(28, "No space left on device")
        return item

    with Prefetcher(fail_at_two, range(5), depth=1) as results:
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(OSError, match="No space left"):
            next(results)

    def draw() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), Prefetcher(done.append, draw(), depth=3) as results:
        list(results)
    assert done == [1]


def test_a_caller_that_stops_waits_for_what_was_begun_only() -> None:
    done = []

    def slow(item: int) -> None:
        time.sleep(0.05)
        done.append(item)

    with Prefetcher(slow, range(100), depth=50) as results:
        next(results)
    assert 1 <= len(done) <= 3
