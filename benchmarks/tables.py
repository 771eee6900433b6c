"""How fast a run ends: merging its shards, its tables, and its report.

    python -m benchmarks.tables [--chunks 1000000] [--frames open longest] [--folder FOLDER]

Makes runs of random contigs with made scores, without any model but a head with random weights for the longest stretches, whose
share is measured alone, too. FOLDER keeps them, so that their tables can be compared; otherwise they are removed. Writes
benchmarks/results/tables.json with wall and CPU seconds of each stage.
"""

import hashlib
import os
import resource
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.reports import Json, command_of, options_of, print_and_write
from virnuc_core import __version__
from virnuc_core.benchmark.run import machine
from virnuc_core.files import make_folder
from virnuc_core.inference.plan import PlannedHead, PlannedModel, RunPlan, Shard, write_plan
from virnuc_core.inference.shard import ModelCounters, ShardCounters, ShardResult, shard_identity, write_shard
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.contig_head import ContigHead, HeadSpec
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.report.page import write_report_page
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.tables import scoring_contigs, write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore, StoreMeta, column_path
from virnuc_core.specs import CODE_WIDTH, FrameRule

CHUNK_LENGTH = 500
SHARD_ROWS = 1 << 16
CHUNKS_EACH = 4.0  # mean of a contig
SHARE_VIRAL = 0.1


def make_store(folder: Path, num_chunks: int, frames: FrameRule, rng: np.random.Generator) -> FrameStore:
    """Random contigs with a geometric number of chunks; one chunk in ten, or in fifty of the longest stretches, has no frame."""
    counts = rng.geometric(1 / CHUNKS_EACH, num_chunks)
    counts = counts[: np.searchsorted(np.cumsum(counts), num_chunks) + 1]
    counts[-1] -= counts.sum() - num_chunks
    num_records = len(counts)
    record = np.repeat(np.arange(num_records), counts)
    index = np.arange(num_chunks) - np.repeat(np.cumsum(counts) - counts, counts)
    most, share_without = (2, 0.02) if frames == "longest" else (3, 0.1)
    each = np.where(rng.random(num_chunks) < share_without, 0, rng.integers(1, most + 1, num_chunks))
    first = np.repeat(np.cumsum(each) - each, each)
    frame_chunk = np.repeat(np.arange(num_chunks), each)
    names = [
        f"NODE_{number}_length_{CHUNK_LENGTH * count}" for number, count in enumerate(counts.tolist(), 1)
    ]
    letters = np.frombuffer(b"ACGT", np.uint8)
    num_frames = len(frame_chunk)
    columns = {
        "record_length": CHUNK_LENGTH * counts,
        "record_number": np.arange(1, num_records + 1),
        "record_name": np.frombuffer("".join(names).encode(), np.uint8),
        "record_name.offsets": np.cumsum([0, *map(len, names)]),
        "sequence": letters[rng.integers(0, 4, CHUNK_LENGTH * num_chunks, np.uint8)],
        "sequence.offsets": np.cumsum([0, *(CHUNK_LENGTH * counts)]),
        "chunk_record": record,
        "chunk_index": index,
        "chunk_start": CHUNK_LENGTH * index,
        "chunk_end": CHUNK_LENGTH * (index + 1),
        "frame_chunk": frame_chunk,
        "frame_number": ((np.arange(num_frames) - first) * 2 + frame_chunk % 2).astype(np.uint8),
        "frame_start": np.zeros(num_frames, np.int64),
        # Their letters are for the models alone.
        "protein.offsets": np.zeros(num_frames + 1, np.int64),
        "dna.offsets": np.zeros(num_frames + 1, np.int64),
    }
    make_folder(folder)
    for name, values in columns.items():
        values.tofile(column_path(folder, name))
    (folder / "rejected.tsv").write_text("record\tid\tfile\tlength\treason\n")
    meta = StoreMeta(
        chunk_length=CHUNK_LENGTH,
        alphabet="dna",
        frames=frames,
        inputs=(),
        num_records=num_records,
        num_chunks=num_chunks,
        num_frames=num_frames,
        num_rejected=0,
        num_renamed=0,
        content_sha256=hashlib.sha256(f"{frames} {num_chunks}".encode()).hexdigest(),
    )
    meta.write(folder)
    return FrameStore.open(folder)


def make_plan(store: FrameStore) -> RunPlan:
    """Shards of equal size, and a model and a head that are never opened."""
    bounds = [*range(0, store.num_frames, SHARD_ROWS), store.num_frames]
    [entry] = find_entries("tiny", "esm2")
    model = PlannedModel(
        name="made",
        family="esm2",
        spec=entry.spec,
        repr_layer=entry.spec.num_layers,
        weights_fingerprint="a" * 64,
        precision="fp32",
        engine="packed",
        attention="sdpa",
        compile_mode="none",
        token_budget=4096,
        location="made",
    )
    return RunPlan(
        kind="predict",
        inputs=(),
        input_digest=store.meta.content_sha256,
        chunk_length=CHUNK_LENGTH,
        frames=store.meta.frames,
        models=(model,),
        head=PlannedHead(name="made", fingerprint="b" * 64, location="made"),
        embeddings="none",
        shards=tuple(
            Shard(index=index, begin=begin, end=end, cost=1.0)
            for index, (begin, end) in enumerate(pairwise(bounds))
        ),
        virnuc_version=__version__,
    )


def make_shards(folder: RunFolder, plan: RunPlan, store: FrameStore, rng: np.random.Generator) -> None:
    """Shards without vectors; scores of a contig differ from those of others by more than those of its own frames."""
    write_plan(folder.plan, plan)
    make_folder(folder.shards)
    kind = np.where(rng.random(store.num_records) < SHARE_VIRAL, 3.0, -4.0)
    for shard in plan.shards:
        size = shard.end - shard.begin
        record = store.chunk_record[store.frame_chunk[shard.begin : shard.end]]
        p_virus = (1 / (1 + np.exp(-rng.normal(kind[record], 2.5)))).astype(np.float32)
        codes = rng.normal(kind[record, None] / 4, 1, (size, CODE_WIDTH)).astype(np.float16)
        work = ModelCounters(
            name="made", family="esm2", sequences=size, tokens=size, batches=1, capacity=size
        )
        result = ShardResult(
            dna=None,
            protein=None,
            scores=np.stack((1 - p_virus, p_virus), axis=1),
            codes=codes if plan.frames == "longest" else None,
            counters=ShardCounters(frames=size, residues=size, bases=3 * size, models=(work,)),
        )
        write_shard(folder.shard(shard.index), result, shard_identity(plan, shard))


def make_head() -> ContigHead:
    """Random weights, of which about a tenth of the contigs are called virus."""
    torch.manual_seed(0)
    classes = ("phage", "other virus", "bacterium", "plasmid")
    head = ContigHead(HeadSpec(dna_width=8, protein_width=8, classes=classes, num_virus=2))
    weights = head.state_dict()
    for layer, bias in (("chunk.3", 5.0), ("context", 14.0), ("contig.3", 1.6)):
        weights[f"{layer}.weight"] *= 20
        weights[f"{layer}.bias"] *= 20
        weights[f"{layer}.bias"][:2] -= bias
    return head.requires_grad_(False).eval()


def measure(folder: RunFolder, num_chunks: int, frames: FrameRule) -> Json:
    """Seconds of the stages of one run."""
    rng = np.random.default_rng(0)
    make_folder(folder.root)
    store = make_store(folder.frames, num_chunks, frames, rng)
    plan = make_plan(store)
    make_shards(folder, plan, store, rng)
    head = make_head() if frames == "longest" else None
    stages: Json = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        stages[name] = {
            "seconds": round(wall, 3),
            "cpu_seconds": round(cpu, 3),
            "chunks_per_second": round(num_chunks / wall),
            "chunks_per_cpu_second": round(num_chunks / cpu),
        }

    with stage("aggregate"):
        work = aggregate(folder, plan, store)
    if head is not None:
        with (
            stage("scores of the head alone"),
            Embeddings(folder.embeddings, own=True) as embeddings,
            scoring_contigs(head, store, embeddings) as blocks,
        ):
            deque(blocks, maxlen=0)
    with stage("tables"):
        counts = write_tables(folder, store, head=head)
    run = RunReport(plan=plan, out="made", counts=counts, work=work, lanes=[], seconds={}, links={})
    with stage("report"):
        write_report_page(folder, {**run.document, "finished": ""})
    sizes = {path.name: path.stat().st_size for path in folder.results if path.exists()}
    return {
        "counts": {name: n for name, n in asdict(counts).items() if name != "sample"},
        "stages": stages,
        "bytes": sizes,
    }


def main() -> None:
    """Command line."""
    parser = options_of("tables", __doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--frames", nargs="+", choices=("open", "longest"), default=("open", "longest"))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="virnuc-tables-") as scratch:
        root = arguments.folder or Path(scratch)
        root.mkdir(exist_ok=True)
        runs = {
            frames: measure(RunFolder(root / frames), arguments.chunks, frames) for frames in arguments.frames
        }
    report = {
        "command": command_of("tables"),
        "machine": machine("cpu"),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "runs": runs,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
