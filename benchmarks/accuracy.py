"""Accuracy of each precision against fp32 on the same device: vectors by cosine, calls by agreement.

    python -m benchmarks.accuracy FASTA... [--precision fp16,bf16,fp8] [--device 0]

Writes benchmarks/results/accuracy.json. Every ORF passes through a whole run, with processes, packing and shards,
once per precision. The default models are the bundled ones, whose head also gives calls of ORFs, chunks and contigs;
other models (--esm-model random:650M) give vectors only.
"""

import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.forward import machine
from benchmarks.reports import Json, command_of, options_of, print_and_write
from virnuc_core.doctor.comparison import cosines
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.plan import write_plan
from virnuc_core.inference.planning import make_plan
from virnuc_core.inference.runner import load_planned_head
from virnuc_core.inference.shard import iter_shard_results
from virnuc_core.models.scores import ScoredRows
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig

UNITS: Final = ("frame", "chunk", "contig")

# Float arrays by name: dna and protein (n, D) of all frames; if there is a head, P(virus) of frames, chunks and contigs, NaN
# without a score.
Results = dict[str, npt.NDArray[Any]]


def compute(config: RunConfig, store: FrameStore, folder: RunFolder, device: str) -> Results:
    folder.root.mkdir()
    folder.frames.symlink_to(store.folder)
    is_bundled = config.esm_model == config.dnabert_model == "tiny"  # there is a head for these alone
    plan = make_plan(config, store, "predict" if is_bundled else "embed", (device,))
    write_plan(folder.plan, plan)
    LocalLanes((device,), in_processes=True).compute(folder)
    shards = [result for _, result in iter_shard_results(folder, plan)]

    def joined(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(shard, name) for shard in shards])

    found = {name: joined(name) for name in ("dna", "protein") if getattr(shards[0], name) is not None}
    if plan.head is not None:
        values = {name: joined(name) for name in ("scores", "codes")}
        rows = ScoredRows(
            read=lambda name, begin, end: values[name][begin:end],
            chunk=store.frame_chunk,
            contig=store.chunk_record,
            num_contigs=store.num_records,
        )
        scores = load_planned_head(plan.head).score_contigs(rows)
        found |= {"frame": values["scores"][:, 1], "chunk": scores.p_chunk, "contig": scores.p_contig}
    return found


def compare(found: Results, reference: Results) -> Json:
    metrics: Json = {}
    for kind in ("dna", "protein"):
        if kind in found:
            cosine = cosines(found[kind], reference[kind])
            metrics[kind] = {
                "worst_cosine": float(cosine.min()),
                "cosine_at_0.1_percent": float(np.quantile(cosine, 0.001)),
                "mean_cosine": float(cosine.mean()),
            }
    if "frame" in found:
        difference = np.abs(found["frame"] - reference["frame"])
        metrics["largest_score_difference"] = float(difference.max())
        metrics |= {f"{unit}_calls_agree": agreement(found[unit], reference[unit]) for unit in UNITS}
    return metrics


def agreement(found: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Share of equal calls, from 0.5 on, among those with a score."""
    is_scored = ~np.isnan(reference)
    return float(((found >= 0.5) == (reference >= 0.5))[is_scored].mean())


def main() -> None:
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
        frames = Path(scratch) / "frames"
        store = build_frame_store(arguments.fasta, frames, arguments.chunk_length, frames="longest")
        for precision in ("fp32", *arguments.precision.split(",")):
            config = RunConfig(**models, precision=precision)
            results[precision] = compute(config, store, RunFolder(Path(scratch) / precision), device)
        num_frames, num_chunks = store.num_frames, len(np.unique(store.frame_chunk))
    reference = results.pop("fp32")
    report = {
        "kind": "accuracy",
        "command": command_of("accuracy"),
        "machine": machine(device),
        "models": models,
        "frames": num_frames,
        "chunks_with_frames": num_chunks,
        "against_fp32": {name: compare(found, reference) for name, found in results.items()},
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
