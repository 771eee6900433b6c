"""Runs one case after another, each in a forked process that may be killed, and classifies the outcome."""

import ctypes
import json
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

import torch

from virnuc_core.errors import VirnucError, storage_error

Ending = Literal["completed", "refused", "killed", "traceback", "crash", "hang"]

_MOST_SECONDS: Final = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a case.

    Attributes:
        ending: "refused" by an error with a documented exit code and a message, or what else happened.
        exit_code: that of `virnuc` for this error.
        error: class of the error.
        message: shown to the user.
    """

    ending: Ending
    exit_code: int = 0
    error: str = ""
    message: str = ""


def run_case(case: Callable[[], object], *, most_seconds: float = _MOST_SECONDS) -> Outcome:
    """Runs a function in a fork of this process that leads its own process group.

    The fork ends like a program, with the cleanup of C libraries.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.close(reader)
        _work(case, writer)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as told:
        said = _read_until(told.fileno(), time.monotonic() + most_seconds)
    status = _ends_by(child, time.monotonic() + most_seconds) if said is not None else None
    if said is None or status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Outcome(ending="hang", message=f"not ended after {most_seconds:.0f} s")
    if not os.WIFSIGNALED(status):
        return Outcome(**json.loads(said))
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL:
        return Outcome(ending="killed")
    return Outcome(ending="crash", message=f"ended by {signal.Signals(number).name} after {said!r}")


def _work(case: Callable[[], object], writer: int) -> NoReturn:
    """Body of the fork."""
    # Torch's threads do not exist in the fork, which would wait for them.
    torch.set_num_threads(1)
    outcome = Outcome(ending="completed")
    try:
        case()
    except BaseException as error:
        outcome = _outcome_of(error)
        raise
    finally:
        os.write(writer, json.dumps(asdict(outcome)).encode())
        os.close(writer)
        ctypes.CDLL(None).exit(0)
        os.abort()  # not reached: the line above does not return


def _outcome_of(error: BaseException) -> Outcome:
    name = type(error).__name__
    told = storage_error(error) if isinstance(error, OSError) else error
    if isinstance(told, VirnucError):
        return Outcome(ending="refused", exit_code=told.exit_code, error=name, message=str(told))
    frames = reversed(traceback.extract_tb(error.__traceback__)[-5:])
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return Outcome(ending="traceback", exit_code=1, error=name, message=f"{error} at {where}")


def _read_until(descriptor: int, deadline: float) -> bytes | None:
    """Reads a pipe to its end; None after the deadline."""
    blocks: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                if not (block := os.read(descriptor, 1 << 16)):
                    return b"".join(blocks)
                blocks.append(block)
    return None


def _ends_by(child: int, deadline: float) -> int | None:
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
