"""The whole way from sequences to scores on one device, against one sequence at a time in fp32 on the CPU."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.doctor.finding import Finding
from virnuc_core.errors import VirnucError
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.launcher import run_lane
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import read_shard, shard_identity
from virnuc_core.inference.worker import run_shards
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Engine

_NUM_CONTIGS: Final = 8
_CODONS: Final = 160  # of each, fewer than fill a chunk
# fp16 on a GPU stays above 0.9999996 and within 0.002 (docs/performance.md); what is broken is far off.
_LEAST_COSINE: Final = 0.9999
_MOST_SCORE_DIFFERENCE: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Vectors and scores of the frames, in row order."""

    vectors: tuple[npt.NDArray[np.float32], ...]
    scores: npt.NDArray[np.float32]


def self_test_findings() -> Iterator[Finding]:
    """A small run on every device, in a process of its own, as a lane of a real run is."""
    with TemporaryDirectory(prefix="virnuc-doctor-") as scratch:
        try:
            folder = Path(scratch)
            write_contigs(folder / "contigs.fa")
            reference = _run(folder, "cpu", "reference")
        except (VirnucError, OSError) as error:
            yield _failed("reference", error, is_device=False)
            return
        for device in dict.fromkeys((*resolve_devices(("auto",)), "cpu")):
            try:
                yield compare(device, _run(folder, device, "packed"), reference)
            except (VirnucError, OSError) as error:
                yield _failed(device, error, is_device=True)


def compare(device: str, found: _Outcome, reference: _Outcome) -> Finding:
    """One device against the reference."""
    cosines = [_cosines(*pair).min() for pair in zip(found.vectors, reference.vectors, strict=True)]
    difference = float(np.abs(found.scores - reference.scores).max())
    # NaN compares as false.
    good = all(cosine >= _LEAST_COSINE for cosine in cosines) and difference <= _MOST_SCORE_DIFFERENCE
    return Finding(
        topic="self test",
        name=device,
        state="ok" if good else "problem",
        found=f"{len(found.scores)} frames, least cosine {min(cosines):.7f}, largest difference of scores {difference:.5f}",
        advice=""
        if good
        else "this device computes wrongly: do not use it; try --attention sdpa, --precision fp32 and another torch",
        is_device=True,
    )


def write_contigs(path: Path) -> None:
    """Random DNA of different lengths with one open frame at least, the same on every machine."""
    letters = random.Random(0)  # noqa: S311 - made-up data
    codons = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT"]
    sense = [codon for codon in codons if codon not in ("TAA", "TAG", "TGA")]
    with path.open("w") as file:
        for number in range(_NUM_CONTIGS):
            length = _CODONS - 15 * number
            file.write(f">contig_{number}\n{''.join(letters.choices(sense, k=length))}\n")


def _run(folder: Path, device: str, engine: Engine) -> _Outcome:
    """Plans a run with the bundled models, computes it and reads what was written."""
    run = RunFolder(folder / f"{engine}-{device.replace(':', '-')}")
    run.root.mkdir()
    store = build_frame_store([folder / "contigs.fa"], run.frames, 500)
    choice = device.removeprefix("cuda:")
    plan = open_plan(RunConfig(devices=(choice,), engine=engine), store, "predict", (device,), run)
    shards = range(len(plan.shards))
    if engine == "reference":
        run_shards(run, shards, device, 0, lambda event: None)
    else:
        run_lane(run, shards, device)
    results: list[Any] = [read_shard(run.shard(s.index), shard_identity(plan, s)) for s in plan.shards]
    return _Outcome(
        vectors=tuple(
            np.concatenate([getattr(each, name) for each in results]) for name in ("dna", "protein")
        ),
        scores=np.concatenate([each.scores for each in results]),
    )


def _cosines(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    a, b = first.astype(np.float64), second.astype(np.float64)
    cosines: npt.NDArray[np.float64] = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return cosines


def _failed(device: str, error: VirnucError | OSError, *, is_device: bool) -> Finding:
    return Finding(
        topic="self test",
        name=device,
        state="problem",
        found=f"it failed: {error}",
        advice="the lines above may say why; otherwise report what virnuc doctor says",
        is_device=is_device,
    )
