"""A process that feeds hostile inputs to one reader, tells what became of each, and is watched meanwhile.

    python -m benchmarks.reliability.child READER SEED BEGIN END FOLDER

One JSON line an input on stdout. The parent ends this process when an input takes too long, and starts another one behind
that input; an input is the same whichever process makes it.
"""

import json
import logging
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.reliability import material, parameters
from benchmarks.reliability.readers import READERS, Reader
from virnuc_core.errors import VirnucError

MEMORY_BYTES: Final = 2 << 30
_MARKER: Final = "executed"
# Audit events that no reader of a weight file needs.
_FORBIDDEN: Final = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.bind", "pickle.find_class", "code.__new__", "ctypes.dlopen"),
)


class _Watch:
    """Records audit events while an input is read; an audit hook cannot be removed, so it is switched."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in _FORBIDDEN:
            self.events.append(f"{event} {arguments!r:.100}")


def make_material(folder: Path) -> None:
    """All valid files, in the current folder."""
    (folder / "in.fa").write_bytes(material.fasta())
    (folder / "in.fq").write_bytes(material.fastq())
    (folder / "proteins.fa").write_bytes(material.fasta("ACDEFGHIKLMNPQRSTVWY"))
    for name, content in material.compressed().items():
        (folder / name).write_bytes(content)
    (folder / "parameters.json").write_bytes(parameters.all_parameters())
    material.make_models(folder)
    material.make_run(folder / "run", folder)


def run_inputs(reader: Reader, seed: int, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Reads the inputs begin..end-1 in the current folder and yields the outcome of each."""
    valid = {
        str(path): path.read_bytes()
        for pattern in reader.targets
        for path in sorted(Path().glob(pattern))
        if path.is_file()
    }
    marker = Path(_MARKER).absolute()
    by_hand = list(reader.crafted(marker)) if begin == 0 else _tail(reader, marker, begin)
    watch = _Watch()
    for index in range(begin, end):
        if index < len(by_hand):
            label, content = by_hand[index]
            name = next(iter(valid))
        else:
            name, content = reader.input_of(index, seed, valid)
            label = ""
        yield {"begun": index}
        path = Path(name)
        path.write_bytes(content)
        watch.is_on = reader.runs_code
        started, processor = time.monotonic(), time.process_time()
        with _Outcome() as outcome:
            reader.read(path.absolute())
        seconds = time.process_time() - processor
        watch.is_on = False
        if watch.events or marker.exists():
            outcome.name, outcome.message = "executed", "; ".join(watch.events) or "the marker is there"
            watch.events.clear()
            marker.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(valid[name])
        yield {
            "index": index,
            "input": label or f"changed {name}",
            "outcome": outcome.name,
            "message": outcome.message,
            "seconds": round(seconds, 3),
            "wall": round(time.monotonic() - started, 3),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }


def _tail(reader: Reader, marker: Path, begin: int) -> list[tuple[str, bytes]]:
    """The crafted inputs from `begin` on, without keeping large ones in memory."""
    return [
        (label, content if i >= begin else b"") for i, (label, content) in enumerate(reader.crafted(marker))
    ]


class _Outcome:
    """Outcome of an input: "accepted", "refused", or the name of a failure; suppresses every exception."""

    def __init__(self) -> None:
        self.name, self.message = "accepted", ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, VirnucError):
            is_harmless = str(error).replace("\n", "").isprintable()
            self.name = "refused" if is_harmless else "harmful message"
            self.message = repr(str(error))[:400]
        elif error is not None:  # including panics of a Rust library, which are BaseExceptions
            last = traceback.extract_tb(trace)[-6:]
            at = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
            self.name, self.message = "traceback", f"{type(error).__name__}: {str(error)[:300]} at {at}"
        return True


def limit_memory() -> None:
    """Limits the process to MEMORY_BYTES; a soft limit, which it may raise again."""
    pages, resident = (int(word) for word in Path("/proc/self/statm").read_text().split()[:2])
    page = os.sysconf("SC_PAGE_SIZE")
    limit = pages * page + MEMORY_BYTES - resident * page
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Command line."""
    name, seed, begin, end, folder = sys.argv[1:]
    reader = next(reader for reader in READERS if reader.name == name)
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    os.chdir(folder)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.disable(logging.WARNING)
    make_material(Path())
    limit_memory()
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        print(json.dumps({"ready": True}), file=out)
        for line in run_inputs(reader, int(seed), int(begin), int(end)):
            print(json.dumps(line), file=out)


if __name__ == "__main__":
    main()
