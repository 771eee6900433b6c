"""Accuracy of each precision against fp32 on the same device: vectors by cosine, calls by agreement.

    python -m benchmarks.accuracy FASTA... [--precision fp16,bf16,fp8] [--device 0]

Writes benchmarks/results/accuracy.json. Every frame passes through a whole run, with processes, packing and shards,
once per precision. The default models are the bundled ones, whose head also gives calls; other models
(--esm-model random:650M) give vectors only.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.reports import print_and_write
from virnuc_core.benchmark.report import machine
from virnuc_core.doctor.comparison import cosines
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.launcher import run_lane
from virnuc_core.inference.plan import write_plan
from virnuc_core.inference.planning import make_plan
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig

RESULT = Path(__file__).parent / "results" / "accuracy.json"


@dataclass(frozen=True, slots=True)
class Answers:
    """Results of one precision for all frames: vectors of each model by kind, and scores (n, 2) if any."""

    vectors: dict[str, npt.NDArray[np.float32]]
    scores: npt.NDArray[np.float32] | None


def compute(config: RunConfig, store: FrameStore, folder: RunFolder, device: str) -> Answers:
    """Runs all frames of a store in one process on one device."""
    folder.root.mkdir()
    folder.frames.symlink_to(store.folder)
    plan = make_plan(config, store, "predict" if has_head(config) else "embed", (device,))
    write_plan(folder.plan, plan)
    run_lane(folder, range(len(plan.shards)), device)
    results = [result for _, result in iter_shard_results(folder, plan)]
    vectors = {
        kind: np.concatenate([getattr(result, kind) for result in results])
        for kind in ("dna", "protein")
        if getattr(results[0], kind) is not None
    }
    scores = [result.scores for result in results if result.scores is not None]
    return Answers(vectors, np.concatenate(scores) if scores else None)


def has_head(config: RunConfig) -> bool:
    """Whether these are the bundled models, for which there is a head."""
    return config.head is not None or config.esm_model == config.dnabert_model == "tiny"


def compare(found: Answers, reference: Answers, frame_chunk: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Cosines of the vectors, and agreement of the calls by frame and by chunk."""
    figures: dict[str, Any] = {}
    for kind, vectors in found.vectors.items():
        cosine = cosines(vectors, reference.vectors[kind])
        figures[kind] = {
            "worst_cosine": float(cosine.min()),
            "cosine_at_0.1_percent": float(np.quantile(cosine, 0.001)),
            "mean_cosine": float(cosine.mean()),
        }
    if found.scores is not None and reference.scores is not None:
        figures["largest_score_difference"] = float(np.abs(found.scores - reference.scores).max())
        pairs = zip(calls(found.scores, frame_chunk), calls(reference.scores, frame_chunk), strict=True)
        for name, (ours, theirs) in zip(("frame_calls_agree", "chunk_calls_agree"), pairs, strict=True):
            figures[name] = float((ours == theirs).mean())
    return figures


def calls(
    scores: npt.NDArray[np.float32], frame_chunk: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.bool_]]:
    """Whether each frame, then each chunk, is viral; a chunk by its best scores for virus and for other."""
    first = np.flatnonzero(np.diff(frame_chunk, prepend=-1))
    best = np.maximum.reduceat(scores, first)
    for each in (scores, best):
        yield each[:, 1] >= each[:, 0]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fasta", nargs="+")
    parser.add_argument("--precision", default="fp16,bf16,fp8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--esm-model", default="tiny")
    parser.add_argument("--dnabert-model", default="tiny")
    parser.add_argument("--chunk-length", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    device = resolve_devices((arguments.device,))[0]
    models = {name: getattr(arguments, name) for name in ("esm_model", "dnabert_model", "chunk_length")}
    with tempfile.TemporaryDirectory() as scratch:
        store = build_frame_store(arguments.fasta, Path(scratch) / "frames", arguments.chunk_length)
        answers = {
            precision: compute(
                RunConfig(**models, precision=precision), store, RunFolder(Path(scratch) / precision), device
            )
            for precision in ("fp32", *arguments.precision.split(","))
        }
        figures = {
            precision: compare(found, answers["fp32"], store.frame_chunk)
            for precision, found in answers.items()
            if precision != "fp32"
        }
        frames, chunks = store.num_frames, len(np.unique(store.frame_chunk))
    options = f"--precision {arguments.precision} --esm-model {arguments.esm_model}"
    report = {
        "kind": "accuracy",
        "command": f"python -m benchmarks.accuracy {' '.join(Path(f).name for f in arguments.fasta)} "
        f"{options} --dnabert-model {arguments.dnabert_model} --chunk-length {arguments.chunk_length}",
        "machine": machine(device),
        "models": models,
        "frames": frames,
        "chunks_with_frames": chunks,
        "against_fp32": figures,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
