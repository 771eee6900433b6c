"""Small valid files of every kind that virnuc reads: seeds of the hostile inputs."""

import argparse
import bz2
import gzip
import json
import lzma
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import torch
from backports import zstd
from safetensors.torch import save, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from virnuc_core.inference.events import (
    GpuSample,
    LaneFailed,
    LaneFinished,
    LaneStarted,
    ModelsLoaded,
    ShardDone,
    StageSeconds,
)
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.plan import RunPlan
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import ModelCounters, ShardCounters, ShardResult, shard_identity, write_shard
from virnuc_core.models.checkpoint import DNABERT, FAIR_ESM, TRANSFORMERS_ESM, KeyLayout, parameter_shapes
from virnuc_core.models.classifier import MLPClassifier
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.settings import RunConfig
from virnuc_core.specs import ModelSpec

CHUNK_LENGTH: Final = 60
_WIDTH: Final = 16
_ESM2: Final = ModelSpec(
    family="esm2",
    num_layers=2,
    embedding_dim=_WIDTH,
    num_heads=2,
    ffn_dim=32,
    vocab_size=33,
    layer_norm_eps=1e-5,
    token_dropout=True,
)
_DNABERT: Final = ModelSpec(
    family="dnabert_s",
    num_layers=2,
    embedding_dim=_WIDTH,
    num_heads=2,
    ffn_dim=32,
    vocab_size=13,
    layer_norm_eps=1e-12,
)
# The empty final block of bgzip files, and the marker of a bgzip block.
_BGZF_END: Final = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


def fasta(letters: str = "ACGT", records: int = 12) -> bytes:
    """Records of several lengths, wrapped or not, with comments, blanks, unusual letters and a duplicate name."""
    rng = Random(letters)
    lines = ["# made", ""]
    for number in range(records):
        sequence = "".join(rng.choices(letters, k=rng.choice((0, 2, 30, 61, 200, 400))))
        lines.append(f">contig{number % 10} of a sample/{number}|x=1")
        lines += [sequence[begin : begin + 70] for begin in range(0, len(sequence), 70)]
    return "\n".join([*lines, ">crlf\r", "ACGTNRYacgtu\r", ">odd", "AC GT-*.\tACG", ""]).encode()


def fastq() -> bytes:
    """Reads."""
    rng = Random(0)
    reads = []
    for number in range(12):
        length = rng.choice((1, 60, 150))
        reads.append(f"@read{number}/1 x\n{''.join(rng.choices('ACGTN', k=length))}\n+\n{'I' * length}\n")
    return "".join(reads).encode()


def bgzip(data: bytes) -> bytes:
    """As bgzip writes it, in two blocks."""
    blocks = []
    for part in (data[: len(data) // 2], data[len(data) // 2 :]):
        body = gzip.compress(part, mtime=0)[10:]
        size = 18 + len(body) - 1
        blocks.append(bytes.fromhex("1f8b08040000000000ff060042430200") + size.to_bytes(2, "little") + body)
    return b"".join(blocks) + _BGZF_END


COMPRESSIONS: Final = (partial(gzip.compress, mtime=0), bgzip, zstd.compress, lzma.compress, bz2.compress)


def compressed() -> dict[str, bytes]:
    """The same FASTA in every compression, by file name."""
    data = fasta()
    return {
        "in.fa.gz": gzip.compress(data, mtime=0),
        "in.fa.bgz": bgzip(data),
        "in.fa.zst": zstd.compress(data),
        "in.fa.xz": lzma.compress(data),
        "in.fa.bz2": bz2.compress(data),
        "two.fa.gz": gzip.compress(data, mtime=0) + gzip.compress(data, mtime=0),
        "reads.fq.gz": gzip.compress(fastq(), mtime=0),
    }


def make_tokenizer(path: Path) -> None:
    """Byte pairs of a few DNA words, with the ids of the published special tokens."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "A", "C", "G", "T", "AC", "GT", "AA", "ACGT"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("A", "C"), ("G", "T"), ("A", "A"), ("AC", "GT")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(path))


def state_dict(spec: ModelSpec, layout: KeyLayout) -> dict[str, torch.Tensor]:
    """Random weights under published names."""
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(spec).items():
        sources = layout.sources(name)
        for source in sources:
            rows = (shape[0] // len(sources), *shape[1:]) if name != "token_type_embedding" else (2, *shape)
            state[source] = torch.randn(rows) * 0.1
    return state


def config_json(spec: ModelSpec) -> dict[str, object]:
    """A model's config.json."""
    return {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.embedding_dim,
        "num_attention_heads": spec.num_heads,
        "intermediate_size": spec.ffn_dim,
        "vocab_size": spec.vocab_size,
        "layer_norm_eps": spec.layer_norm_eps,
        "position_embedding_type": "rotary",
        "token_dropout": spec.token_dropout,
        "emb_layer_norm_before": False,
    }


def make_models(folder: Path) -> None:
    """`esm2_fair.pt`, `esm2/`, `dnabert/`, `sharded/` and the heads `head.*`."""
    arguments = argparse.Namespace(
        encoder_layers=2, encoder_embed_dim=_WIDTH, encoder_attention_heads=2, token_dropout=True, arch="esm2"
    )
    model = {f"encoder.sentence_encoder.{n}": t for n, t in state_dict(_ESM2, FAIR_ESM).items()}
    torch.save({"cfg": {"model": arguments}, "model": model}, folder / "esm2_fair.pt")
    for name, spec, layout in (("esm2", _ESM2, TRANSFORMERS_ESM), ("dnabert", _DNABERT, DNABERT)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config_json(spec)))
        state = state_dict(spec, layout)
        if name == "esm2":
            torch.save(state, folder / name / "pytorch_model.bin")
        else:
            save_file(state, folder / name / "model.safetensors")
            make_tokenizer(folder / name / "tokenizer.json")
    _make_sharded(folder / "sharded")
    _make_heads(folder)


def _make_sharded(folder: Path) -> None:
    folder.mkdir()
    state = state_dict(_ESM2, TRANSFORMERS_ESM)
    names = sorted(state)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_json(_ESM2)))


def _make_heads(folder: Path) -> None:
    head = MLPClassifier(2 * _WIDTH, 8)
    (folder / "head.safetensors").write_bytes(save(head.state_dict()))
    torch.save(head.state_dict(), folder / "head_state.pth")
    torch.save(head.state_dict(), folder / "head_legacy.pth", _use_new_zipfile_serialization=False)
    # As published: the whole module, of a class defined in the training script.
    main = sys.modules["__main__"]
    published = type(
        "MLPClassifier", (MLPClassifier,), {"__module__": "__main__", "__qualname__": "MLPClassifier"}
    )
    main.MLPClassifier = published  # type: ignore[attr-defined]
    head.__class__ = published
    torch.save(head, folder / "head_module.pth")
    del main.MLPClassifier


def make_run(root: Path, models_folder: Path) -> RunPlan:
    """A finished predict run of several shards with random numbers."""
    root.mkdir()
    folder = RunFolder(root)
    (root / "in.fa").write_bytes(fasta())
    store = build_frame_store([root / "in.fa"], folder.frames, CHUNK_LENGTH)
    config = RunConfig(
        chunk_length=CHUNK_LENGTH,
        esm_model=str(models_folder / "esm2"),
        dnabert_model=str(models_folder / "dnabert"),
        head=str(models_folder / "head.safetensors"),
        devices=("cpu",),
    )
    plan = open_plan(config, store, "predict", ("cpu",), folder)
    folder.shards.mkdir()
    numbers = np.random.default_rng(0)
    for shard in plan.shards:
        rows = shard.end - shard.begin
        virus = numbers.random(rows, np.float32)
        result = ShardResult(
            dna=numbers.standard_normal((rows, _WIDTH), np.float32),
            protein=numbers.standard_normal((rows, _WIDTH), np.float32),
            scores=np.stack([1 - virus, virus], axis=1),
            counters=_counters(plan, rows),
        )
        write_shard(folder.shard(shard.index), result, shard_identity(plan, shard))
    aggregate(folder, plan, store)
    counts = write_tables(folder, store)
    folder.report.write_text(json.dumps({"schema_version": 2, "counts": asdict(counts), "out": "run"}))
    _write_journal(folder, plan)
    return plan


def _counters(plan: RunPlan, rows: int) -> ShardCounters:
    models = tuple(
        ModelCounters(
            name=m.name, family=m.family, sequences=rows, tokens=9 * rows, batches=1, capacity=10 * rows
        )
        for m in plan.models
    )
    return ShardCounters(frames=rows, residues=7 * rows, bases=21 * rows, models=models)


def _write_journal(folder: RunFolder, plan: RunPlan) -> None:
    shards = tuple(shard.index for shard in plan.shards)
    with LaneJournal(folder.lane_journal("lane-0000")) as journal:
        journal.write(LaneStarted(lane=0, device="cpu", host="here", pid=7, shards=shards))
        journal.write(ModelsLoaded(lane=0, device="cpu", device_name="CPU", seconds=1.5))
        journal.write(GpuSample(lane=0, utilization=0.5, memory_bytes=1 << 30))
        for shard in plan.shards:
            counters = _counters(plan, shard.end - shard.begin)
            journal.write(
                ShardDone(lane=0, shard=shard.index, counters=counters, seconds=StageSeconds(forward=1.0))
            )
        journal.write(LaneFailed(lane=0, error="DeviceError", message="gone", retryable=False))
        journal.write(LaneFinished(lane=0, seconds=9.0))
