"""Timing of work that is launched ahead of the device."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

# As many as the engine launches ahead: the device never waits for the host, and memory stays bounded.
_AHEAD: Final = 3


def rounds_per_second(steps: Sequence[Callable[[], object]], seconds: float, device: str) -> float:
    """How often a second all steps are done, one after another, over at least `seconds`.

    Args:
        steps: each launches its work on the device's current stream.
        seconds: whole rounds are done until so much time has passed.
        device: "cpu" or "cuda:N".
    """
    events: deque[torch.cuda.Event] = deque()
    synchronize(device)
    started = time.perf_counter()
    rounds = 0
    while time.perf_counter() - started < seconds:
        for step in steps:
            step()
            if device != "cpu":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                events.append(event)
            if len(events) > _AHEAD:
                events.popleft().synchronize()
        rounds += 1
    synchronize(device)
    return rounds / (time.perf_counter() - started)


def synchronize(device: str) -> None:
    """Waits until the device has done everything."""
    if device != "cpu":
        torch.cuda.synchronize(device)
