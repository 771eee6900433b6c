"""Feeds hostile inputs to every reader of virnuc: the only outcomes allowed are a result and an error of virnuc's own.

    python -m benchmarks.reliability.fuzz [--number 10000] [--reader NAME] [--seed N] [--seconds 5]

Each reader gets its hand-made inputs, and valid files that Hypothesis edits. It has a process of its own with 2 GB of memory
in all; an input may take `--seconds` of processor time. Weight files are read under an audit hook, which tells of every
process, connection and name looked up for a pickle: "executed" counts the inputs that brought about any. An input with
another outcome is kept beside the report.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.reliability.edits import edited
from benchmarks.reliability.harness import (
    MEMORY_BYTES,
    RESULTS,
    Outcome,
    limit_memory,
    main,
    program,
    run_forked,
    say,
)
from benchmarks.reliability.readers import READERS, make_samples

_MARKER: Final = "executed"
# Inputs drawn at once: Hypothesis remembers all of them.
_BLOCK: Final = 500
# A process is ended after so many times the seconds that an input may take, of processor and of wall time.
_CPU_FACTOR, _WALL_FACTOR = 2, 24
_MOST_SECONDS: Final = 86_400.0
_ALLOWED: Final = ("accepted", "refused")
_WRONG: Final = ("traceback", "hang", "crash", "executed", "harmful message")
_KEPT_FAILURES: Final = 20
# Audit events that no reader of a weight file needs.
_FORBIDDEN: Final = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.bind", "pickle.find_class", "code.__new__", "ctypes.dlopen"),
)


def draw_inputs(
    name: str, valid: Mapping[str, bytes], number: int, start: int, read: Callable[[str, str, bytes], object]
) -> None:
    """Calls `read(label, file, content)` with edited files; they are the same for the same `start`."""
    for block in range(0, number, _BLOCK):

        @seed(f"{start} {name} {block}")
        @settings(
            max_examples=min(_BLOCK, number - block),
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(edited(READERS[name].edit, valid))
        def draw(example: tuple[str, bytes]) -> None:
            read(f"edited {example[0]}", *example)

        draw()


def feed(name: str, folder: Path, told: Path, begin: int, number: int, start: int, seconds: float) -> None:
    """Reads the inputs of a reader from `begin` on in a folder of samples, and adds a line for each to `told`.

    The inputs are the hand-made ones and `number` edited files, drawn from `start`.
    """
    reader, marker, index = READERS[name], folder / _MARKER, count()
    os.chdir(folder)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    limit_memory()
    samples = [path for pattern in reader.targets for path in sorted(Path().glob(pattern)) if path.is_file()]
    valid = {str(path): path.read_bytes() for path in samples}
    heard: list[str] = []
    is_watched = False

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watched and event in _FORBIDDEN:
            heard.append(f"{event} {arguments!r:.100}")

    sys.addaudithook(hear)

    def read(label: str, target: str, content: bytes) -> None:
        nonlocal is_watched
        number, path = next(index), Path(target)
        if number < begin:
            return
        path.write_bytes(content)
        tell({"index": number, "input": label, "file": target})
        signal.setitimer(signal.ITIMER_PROF, _CPU_FACTOR * seconds)
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * seconds)
        started = time.process_time()
        is_watched = reader.runs_code
        with Outcome() as outcome:
            reader.read(path.absolute())
        is_watched = False
        took = time.process_time() - started
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        ending = "accepted" if outcome.ending == "completed" else outcome.ending
        if heard or marker.exists():
            ending, outcome.message = "executed", "; ".join(heard) or "the marker is there"
            heard.clear()
            marker.unlink(missing_ok=True)
        elif took > seconds:
            ending = "hang"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        tell({"outcome": ending, "message": outcome.message, "seconds": round(took, 3), "peak_mb": peak})
        if ending not in _ALLOWED:
            told.with_suffix(f".{number}").write_bytes(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(valid[target])

    with told.open("a", buffering=1) as file:

        def tell(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")

        for label, content in dict(reader.crafted(marker)).items():
            read(label, str(samples[0]), content)
        draw_inputs(name, valid, number, start, read)


def fuzz_reader(name: str, scratch: Path, number: int, start: int, seconds: float) -> list[dict[str, Any]]:
    """Results of a reader's inputs; a process that an input ended is followed by another one."""
    told, work = scratch / "told.jsonl", scratch / "work"
    told.unlink(missing_ok=True)
    results: list[dict[str, Any]] = []
    ending = ""
    while ending != "completed":
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(scratch / "samples", work)
        begin = len(results)
        outcome = run_forked(
            lambda begin=begin: feed(name, work, told, begin, number, start, seconds),  # type: ignore[misc]
            _MOST_SECONDS,
        )
        ending = outcome.ending
        lines = list(map(json.loads, told.read_text().splitlines()))
        if ending != "completed":
            if not lines or "outcome" in lines[-1]:
                raise RuntimeError(f"the process for {name} ended: {outcome}")
            lines.append({"outcome": ending, "message": outcome.message})
            with told.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            shutil.copy(work / lines[-2]["file"], told.with_suffix(f".{lines[-2]['index']}"))
        results = [begun | ended for begun, ended in zip(lines[::2], lines[1::2], strict=True)]
    return results


def figures_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of inputs by outcome, the slowest one, and the first failures."""
    outcomes = Counter(result["outcome"] for result in results)
    slowest = max(results, key=lambda result: float(result.get("seconds", 0.0)))
    wrong = [result for result in results if result["outcome"] not in _ALLOWED]
    return {
        "inputs": len(results),
        **{name.replace(" ", "_"): outcomes[name] for name in (*_ALLOWED, *_WRONG)},
        "slowest_seconds": slowest.get("seconds", 0.0),
        "slowest": f"{slowest['index']}: {slowest['input']}",
        "peak_mb": max(result.get("peak_mb", 0) for result in results),
        "failures": wrong[:_KEPT_FAILURES],
    }


def measure(
    scratch: Path, number: int, reader: list[str] | None, seed: int, seconds: float
) -> dict[str, Any]:
    """Figures of each reader."""
    (scratch / "samples").mkdir()
    make_samples(scratch / "samples")
    readers: dict[str, dict[str, Any]] = {}
    for name in reader or READERS:
        begun = time.monotonic()
        readers[name] = figures_of(fuzz_reader(name, scratch, number, seed, seconds))
        for failure in readers[name]["failures"]:
            kept = RESULTS / "failed" / f"{name} {failure['index']}"
            kept.parent.mkdir(exist_ok=True)
            shutil.copy(scratch / f"told.{failure['index']}", kept)
            say(f"{name}: {failure} is kept as {kept}")
        say(f"{name}: {readers[name]['inputs']} inputs in {time.monotonic() - begun:.0f} s")
    return {
        "edited_each": number,
        "seed": seed,
        "limits": {"seconds": seconds, "memory_mb": MEMORY_BYTES >> 20},
        "readers": readers,
        "failures": [failure for figures in readers.values() for failure in figures["failures"]],
    }


if __name__ == "__main__":
    parser = program(__doc__, "fuzz")
    parser.add_argument("--number", type=int, default=10_000, help="edited inputs for each reader")
    parser.add_argument("--reader", action="append", choices=READERS, metavar="NAME", help="; ".join(READERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0, help="processor time that an input may take")
    main(parser, measure)
