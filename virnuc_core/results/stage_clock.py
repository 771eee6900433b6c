"""How long each stage of a run takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_DECIMALS: Final = 3


class StageClock:
    """Names the stages of a run as they begin and keeps their wall times.

    Args:
        tell: is given the name of each stage that begins.

    Attributes:
        seconds: wall time of each finished stage, in order.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.seconds: Final[dict[str, float]] = {}
        self._tell = tell

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """One stage, from the beginning of the block to its end."""
        self._tell(name)
        begin = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - begin, _DECIMALS)
