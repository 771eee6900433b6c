"""Work that is done ahead, in background threads."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Prefetcher(Generic[T, R]):
    """Applies a function to items in background threads, one unless more are given, and yields the results in order.

    A context manager: entering starts the first items, and leaving joins the threads. Items are drawn in the calling thread,
    up to `depth` ahead; exceptions of the function are raised by `next`. If drawing fails, earlier items are still processed;
    if the caller stops, only items already started are.
    """

    def __init__(
        self, function: Callable[[T], R], items: Iterable[T], *, depth: int, threads: int = 1
    ) -> None:
        self._function = function
        self._items = iter(items)
        self._depth = depth
        name = getattr(function, "__name__", "prefetch")
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._queue: deque[Future[R]] = deque()

    def __enter__(self) -> Self:
        self._fill()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        self._fill()
        if not self._queue:
            raise StopIteration
        return self._queue.popleft().result()

    def _fill(self) -> None:
        try:
            while len(self._queue) <= self._depth:
                self._queue.append(self._threads.submit(self._function, next(self._items)))
        except StopIteration:
            return
        except BaseException:
            self._threads.shutdown()
            raise
