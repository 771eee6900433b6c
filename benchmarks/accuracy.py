"""Accuracy of each precision against fp32 on the same device: vectors by cosine, calls by agreement.

    python -m benchmarks.accuracy FASTA... [--precision fp16,bf16,fp8] [--device 0]

Writes benchmarks/results/accuracy.json. Every frame passes through a whole run, with processes, packing and shards,
once per precision. The default models are the bundled ones, whose head also gives calls; other models
(--esm-model random:650M) give vectors only.
"""

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.reports import Json, command_of, options_of, print_and_write
from virnuc_core.benchmark.run import machine
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

# Float arrays of all frames by name: dna and protein (n, D), scores (n, 2) if there is a head.
Results = dict[str, npt.NDArray[np.float32]]


def compute(config: RunConfig, store: FrameStore, folder: RunFolder, device: str) -> Results:
    """Runs all frames of a store in one process on one device."""
    folder.root.mkdir()
    folder.frames.symlink_to(store.folder)
    is_bundled = config.esm_model == config.dnabert_model == "tiny"  # there is a head for these alone
    plan = make_plan(config, store, "predict" if is_bundled else "embed", (device,))
    write_plan(folder.plan, plan)
    run_lane(folder, range(len(plan.shards)), device)
    shards = [result for _, result in iter_shard_results(folder, plan)]
    return {
        name: np.concatenate([getattr(shard, name) for shard in shards])
        for name in ("dna", "protein", "scores")
        if getattr(shards[0], name) is not None
    }


def compare(found: Results, reference: Results, frame_chunk: npt.NDArray[np.int64]) -> Json:
    """Cosines of the vectors, and agreement of the calls by frame and by chunk."""
    metrics: Json = {}
    for kind in ("dna", "protein"):
        if kind in found:
            cosine = cosines(found[kind], reference[kind])
            metrics[kind] = {
                "worst_cosine": float(cosine.min()),
                "cosine_at_0.1_percent": float(np.quantile(cosine, 0.001)),
                "mean_cosine": float(cosine.mean()),
            }
    if "scores" in found:
        metrics["largest_score_difference"] = float(np.abs(found["scores"] - reference["scores"]).max())
        pairs = zip(calls(found["scores"], frame_chunk), calls(reference["scores"], frame_chunk), strict=True)
        for unit, (called, expected) in zip(("frame", "chunk"), pairs, strict=True):
            metrics[f"{unit}_calls_agree"] = float((called == expected).mean())
    return metrics


def calls(
    scores: npt.NDArray[np.float32], frame_chunk: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether each frame, and each chunk, is viral; a chunk by its best scores for virus and for other."""
    best = np.maximum.reduceat(scores, np.flatnonzero(np.diff(frame_chunk, prepend=-1)))
    return scores[:, 1] >= scores[:, 0], best[:, 1] >= best[:, 0]


def main() -> None:
    """Command line."""
    parser = options_of("accuracy", __doc__)
    parser.add_argument("fasta", nargs="+")
    parser.add_argument("--precision", default="fp16,bf16,fp8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--esm-model", default="tiny")
    parser.add_argument("--dnabert-model", default="tiny")
    parser.add_argument("--chunk-length", type=int, default=500)
    arguments = parser.parse_args()
    device = resolve_devices((arguments.device,))[0]
    models = {name: getattr(arguments, name) for name in ("esm_model", "dnabert_model", "chunk_length")}
    results: dict[str, Results] = {}
    with tempfile.TemporaryDirectory() as scratch:
        store = build_frame_store(arguments.fasta, Path(scratch) / "frames", arguments.chunk_length)
        for precision in ("fp32", *arguments.precision.split(",")):
            config = RunConfig(**models, precision=precision)
            results[precision] = compute(config, store, RunFolder(Path(scratch) / precision), device)
        frame_chunk = np.array(store.frame_chunk)
    reference = results.pop("fp32")
    report = {
        "kind": "accuracy",
        "command": command_of("accuracy"),
        "machine": machine(device),
        "models": models,
        "frames": len(frame_chunk),
        "chunks_with_frames": len(np.unique(frame_chunk)),
        "against_fp32": {name: compare(found, reference, frame_chunk) for name, found in results.items()},
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
