"""Feeds hostile inputs to the commands: the only outcomes allowed are a right result and an error of virnuc's own.

    python -m benchmarks.reliability.fuzz [--number 1000] [--reader NAME] [--seed N] [--seconds 20]

Hypothesis edits valid files: any bytes, and values of JSON. Each reader has a process of its own with 2 GB of memory in all; an
input may take `--seconds` of processor time. An audit hook tells of every process, connection and name looked up for a pickle:
"executed" counts the inputs that brought about any. What is accepted of a finished run must give the outputs that it had. The
first input with another outcome ends its reader, and is kept beside the report.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from backports import zstd
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from safetensors.torch import load_file

from benchmarks.reliability.harness import (
    SmallRun,
    final_files,
    is_harmless,
    main,
    outcome_of,
    run_forked,
    say,
    work,
)
from benchmarks.reports import RESULTS, options_of
from virnuc_cli.main import main as virnuc
from virnuc_core.models import catalogue
from virnuc_core.models.hub import open_checkpoint

Draw = Callable[..., Any]  # of Hypothesis: a strategy's value

MEMORY_BYTES: Final = 2 << 30
_ALLOWED: Final = ("accepted", "refused")
_WRONG: Final = ("traceback", "crash", "executed", "harmful message")
_FORBIDDEN: Final = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.bind", "pickle.find_class"),
)
_PIECES: Final = st.binary(max_size=64) | st.sampled_from(
    (*(b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x1b[2J\x1b]0;owned\x07"), *(b"\r", b"\n\n", b"=1+1"))
)
_VALUES: Final = st.one_of(
    st.sampled_from(
        (None, True, -1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "\0", "\ud800")
    ),
    st.sampled_from(
        ("\x1b[31m", "../../etc/passwd", "a" * 10_000, [], {}, [[]], {"": None}, [0] * 10_000)
    ).map(deepcopy),
    *(st.integers(), st.floats(), st.text()),
)


def edit_bytes(draw: Draw, data: bytes) -> bytes:
    """Overwrites, inserts, cuts out, moves or repeats pieces anywhere."""
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4, 16)))):
        begin = draw(st.integers(0, len(data)))
        piece = draw(_PIECES)
        if draw(st.integers(1, 3)) == 3:  # from the file itself
            source = draw(st.integers(0, len(data)))
            piece = data[source : source + draw(st.integers(1, 512))] * draw(st.sampled_from((1, 1, 2, 512)))
        removed = draw(st.sampled_from((len(piece), len(piece), 0)) | st.integers(0, len(data)))
        data = data[:begin] + piece + data[begin + removed :]
    return data


def edit_json(draw: Draw, data: bytes) -> bytes:
    """Changes values and keys of a JSON document, or its bytes."""
    if draw(st.integers(1, 4)) == 4:
        return edit_bytes(draw, data)
    document = json.loads(data)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        holder, key = draw(st.sampled_from(_places(document)))
        match draw(st.integers(0, 3)):
            case 0:
                holder[key] = None
            case 1 if isinstance(holder, dict):
                holder[str(key) * 2] = holder[key]
            case 2 if type(holder[key]) is int:
                holder[key] += draw(st.sampled_from((-1, 1, 1 << 16, 1 << 31, 1 << 40, -(1 << 40))))
            case _:
                holder[key] = draw(_VALUES)
    return json.dumps(document).encode()


def _places(document: Any) -> list[tuple[Any, Any]]:
    keys = document.keys() if isinstance(document, dict) else range(len(document))
    own = [(document, key) for key in keys]
    inner = (_places(document[key]) for key in keys if isinstance(document[key], dict | list))
    return [*own, *chain.from_iterable(inner)]


def call(*arguments: str | Path) -> int:
    """Runs a command in this process; gives its exit code.

    Raises:
        AssertionError: it failed unexpectedly, or printed what can harm a terminal.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = virnuc(list(map(str, arguments)))
    text = printed.getvalue()
    if "unexpected" in text or code not in range(7) or code == 1:
        raise AssertionError(f"exit code {code}: {text[-600:]!r}")
    if not is_harmless(text):
        raise AssertionError(f"what is printed can do harm: {text[:300]!r}")
    return code


@dataclass(frozen=True, slots=True)
class Reader:
    """Files in a folder of samples that are edited, one at a time, and what reads the edited one and gives the exit code."""

    samples: tuple[str, ...]
    read: Callable[[Path], int]
    edit: Callable[[Draw, bytes], bytes] = edit_bytes


def _model(path: Path) -> int:
    code = call("inspect", path.parent)
    parts = open_checkpoint(str(path.parent), None).published_parts()
    if not all(tensor.is_floating_point() for tensors in parts.values() for tensor in tensors):
        raise AssertionError("weights that are no real numbers")
    return code


def _score(embeddings: Path, head: Path, out: str) -> int:
    return call("score", embeddings, "--head", head, "--out", out)


def _embeddings(path: Path) -> int:
    """What is found complete must have the scores of the undamaged file."""
    code = call("inspect", path) or _score(path, Path("head.safetensors"), "again.tsv")
    if code == 0 and Path("again.tsv").read_bytes() != Path("expected.tsv").read_bytes():
        raise AssertionError("a changed value without an error")
    return code


def _run(path: Path) -> int:
    """A finished run that is gone on with must end with the outputs that it had."""
    root = path.absolute().parents[len(path.parts) - 2]
    work(root.with_name("contigs.fa"), root)
    if final_files(root) != json.loads(Path("expected.json").read_text()):
        raise AssertionError("other outputs")
    return 0


READERS: Final[dict[str, Reader]] = {
    "sequences": Reader(
        ("in.fa", "in.fq", "in.fa.gz", "in.fa.zst", "in.fa.xz", "in.fa.bz2"),
        lambda path: call("frames", path, "--chunk-length", "60", "--out", "frames.tsv"),
    ),
    "weights": Reader(("dnabert/model.safetensors", "torch/pytorch_model.bin"), _model),
    "model configuration": Reader(("dnabert/config.json", "esm2/config.json"), _model, edit_json),
    "heads": Reader(
        ("head.safetensors",), lambda path: _score(Path("run/embeddings.h5"), path, "scores.tsv")
    ),
    "embeddings.h5": Reader(("run/embeddings.h5",), _embeddings),
    "shards": Reader(("run/shards/shard_00000.h5", "run/shards/shard_00001.h5"), _run),
    "plan.json": Reader(("run/plan.json",), _run, edit_json),
    "run.json": Reader(("run/run.json",), lambda path: call("inspect", path.parent), edit_json),
}


def make_samples(folder: Path) -> None:
    fasta = "".join(f">contig{n % 5} of a sample\n{'ACGTTGCAAC' * (7 * n)}\n" for n in range(8)).encode()
    fastq = "".join(f"@read{n}/1 x\n{'ACGTN' * 30}\n+\n{'I' * 150}\n" for n in range(8)).encode()
    pack: tuple[Callable[[bytes], bytes], ...] = (
        bytes,
        gzip.compress,
        zstd.compress,
        lzma.compress,
        bz2.compress,
    )
    for suffix, packed in zip(("", ".gz", ".zst", ".xz", ".bz2"), pack, strict=True):
        (folder / f"in.fa{suffix}").write_bytes(packed(fasta))
    (folder / "in.fq").write_bytes(fastq)
    bundled = Path(catalogue.__file__).with_name("bundled")
    for name in ("dnabert", "esm2"):
        shutil.copytree(bundled / f"{name}_tiny", folder / name, ignore=shutil.ignore_patterns("SHA256SUMS"))
    shutil.copytree(folder / "esm2", folder / "torch", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(folder / "esm2" / "model.safetensors"), folder / "torch" / "pytorch_model.bin")
    shutil.copy(bundled / "heads" / "tiny.safetensors", folder / "head.safetensors")
    (folder / "expected.json").write_text(json.dumps(SmallRun(folder, 8).expected))
    with contextlib.chdir(folder):
        _score(Path("run/embeddings.h5"), Path("head.safetensors"), "expected.tsv")


def feed(name: str, samples: Path, told: Path, number: int, seed: int, seconds: float) -> None:
    """Reads `number` edited files in a fresh copy of the samples each, and adds a line for each to `told`; the samples come first, as they are."""
    reader, folder, heard = READERS[name], samples.with_name("work"), list[str]()
    is_watched = False

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watched and event in _FORBIDDEN:
            heard.append(f"{event} {arguments!r:.100}")

    sys.addaudithook(hear)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def read(target: str, content: bytes, is_valid: bool = False) -> None:
        nonlocal is_watched
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(samples, folder)
        with contextlib.chdir(folder):
            Path(target).write_bytes(content)
            told.with_suffix(".input").write_bytes(content)
            codes: list[int] = []
            signal.setitimer(signal.ITIMER_PROF, seconds)
            started, is_watched = time.process_time(), True
            outcome = outcome_of(lambda: codes.append(reader.read(Path(target))))
            is_watched = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        ending = outcome.ending if outcome.ending != "completed" else "refused" if any(codes) else "accepted"
        ending, message = ("executed", "; ".join(heard)) if heard else (ending, outcome.message)
        line = {"outcome": ending, "message": message, "file": target}
        with told.open("a") as file:
            file.write(json.dumps({**line, "seconds": time.process_time() - started}) + "\n")
        if ending not in _ALLOWED or (is_valid and ending != "accepted"):
            raise RuntimeError(message)

    for target in reader.samples:
        read(target, (samples / target).read_bytes(), is_valid=True)

    @seeded(f"{seed} {name}")
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def read_edited(drawn: st.DataObject) -> None:
        target = drawn.draw(st.sampled_from(reader.samples))
        read(target, reader.edit(drawn.draw, (samples / target).read_bytes()))

    read_edited()


def fuzz_reader(name: str, scratch: Path, number: int, seed: int, seconds: float) -> dict[str, Any]:
    told = scratch / f"{name}.jsonl"
    ended = run_forked(partial(feed, name, scratch / "samples", told, number, seed, seconds), 86_400.0)
    results = list(map(json.loads, told.read_text().splitlines())) if told.exists() else []
    wrong = [result for result in results if result["outcome"] not in _ALLOWED]
    if ended.ending != "completed" and not wrong:
        ending = "hang" if "SIGPROF" in ended.message else ended.ending
        wrong = [{"outcome": ending, "message": ended.message}]
        results += wrong
    for failure in wrong:
        kept = RESULTS / "reliability" / "failed" / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(told.with_suffix(".input"), kept)
        say(f"{name}: {failure} is kept as {kept}")
    outcomes = Counter(result["outcome"] for result in results)
    return {
        "inputs": len(results),
        **{outcome.replace(" ", "_"): outcomes[outcome] for outcome in (*_ALLOWED, *_WRONG, "hang")},
        "slowest_seconds": max((result.get("seconds", 0.0) for result in results), default=0.0),
        "failures": wrong,
    }


def measure(
    scratch: Path, number: int, reader: list[str] | None, seed: int, seconds: float
) -> dict[str, Any]:
    (scratch / "work").mkdir()
    make_samples(scratch / "work")  # where they are read, since a run remembers its place
    shutil.copytree(scratch / "work", scratch / "samples")
    readers = {}
    for name in reader or READERS:
        readers[name] = fuzz_reader(name, scratch, number, seed, seconds)
        say(f"{name}: {readers[name]}")
    return {
        **{"edited_each": number, "seed": seed, "seconds": seconds},
        "readers": readers,
        "failures": [failure for figures in readers.values() for failure in figures["failures"]],
    }


if __name__ == "__main__":
    parser = options_of("reliability.fuzz", __doc__)
    parser.add_argument("--number", type=int, default=1000, help="edited inputs for each reader")
    parser.add_argument("--reader", action="append", choices=READERS, metavar="NAME", help="; ".join(READERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="processor time that an input may take")
    main(parser, measure)
