"""Every reader of virnuc: its files, their mutations, and the function under test."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.reliability import crafted, material, parameters, reading
from benchmarks.reliability.binary_edits import hostile_json, mutate_archive, mutate_hdf5, mutate_safetensors
from benchmarks.reliability.malicious_pickles import malicious_files
from benchmarks.reliability.mutations import Mutation, mutate_bytes, mutate_json, splice_of

Crafted = Callable[[Path], Iterable[tuple[str, bytes]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One kind of input.

    Attributes:
        targets: patterns of the material's files to mutate, one at a time.
        read: reads the mutated file, or its folder; may raise only VirnucError.
        mutate: mutates a valid file; None mutates bytes.
        crafted: further inputs by name, each replacing the first target.
        runs_code: whether the input could carry code, so that the process is watched.
        spliced: whether parts of two valid files may be joined.
    """

    name: str
    targets: tuple[str, ...]
    read: Callable[[Path], None]
    mutate: Mutation | None = None
    crafted: Crafted = lambda _: ()
    runs_code: bool = False
    spliced: bool = True

    def input_of(self, index: int, seed: int, valid: Mapping[str, bytes]) -> tuple[str, bytes]:
        """File name and content of an input, deterministic in the arguments."""
        rng = Random(f"{seed} {self.name} {index}")
        name = rng.choice(sorted(valid))
        change = self.mutate or mutate_bytes
        if self.spliced and rng.random() < 0.1:
            change = splice_of([valid[key] for key in sorted(valid)])
        return name, change(valid[name], rng)


def _mutate_lines(data: bytes, rng: Random) -> bytes:
    """Mutates the JSON of some lines of a journal."""
    valid = data.splitlines()
    lines = list(valid)
    for _ in range(rng.choice((1, 2, 4))):
        place = rng.randrange(len(lines))
        change = mutate_json if rng.random() < 0.8 and lines[place] in valid else mutate_bytes
        lines[place] = change(lines[place], rng)
        lines.insert(rng.randint(0, len(lines)), rng.choice(valid))
    return b"\n".join(lines) + rng.choice((b"\n", b""))


def _mutate_compressed(data: bytes, rng: Random) -> bytes:
    """Mutates compressed bytes, mostly found by the format's own checks, or their content."""
    if rng.random() < 0.5:
        return mutate_bytes(data, rng)
    return rng.choice(material.COMPRESSIONS)(
        mutate_bytes(rng.choice((material.fasta(), material.fastq())), rng)
    )


def _json_or_bytes(data: bytes, rng: Random) -> bytes:
    return mutate_json(data, rng) if rng.random() < 0.75 else mutate_bytes(data, rng)


def _store_edits(data: bytes, rng: Random) -> bytes:
    return mutate_json(data, rng) if data.startswith(b"{") and rng.random() < 0.8 else mutate_bytes(data, rng)


def _malicious(marker: Path) -> Iterator[tuple[str, bytes]]:
    yield from malicious_files(marker).items()


def _pickled_models(marker: Path) -> Iterator[tuple[str, bytes]]:
    yield from _malicious(marker)
    names = [f"encoder.layer.0.attention.self.{part}.weight" for part in ("query", "key", "value")]
    yield from crafted.torch_files(names).items()


def _pickled_heads(marker: Path) -> Iterator[tuple[str, bytes]]:
    yield from _malicious(marker)
    yield from crafted.torch_files(["hidden_layer.weight", "output_layer.weight", "bn1.weight"]).items()
    yield "2^40 modules", crafted.module_of_modules()
    yield "1 GB of strings in 1 MB", crafted.compressed_archive()


def _made_json(key: str) -> Crafted:
    return lambda _: hostile_json(key).items()


READERS: Final[tuple[Reader, ...]] = (
    Reader(
        name="FASTA",
        targets=("in.fa",),
        read=reading.read_dna,
        crafted=lambda _: (crafted.odd_names(b">", b" x\nACGTACGTACGT\n") | crafted.fasta_layouts()).items(),
    ),
    Reader(
        name="FASTQ",
        targets=("in.fq",),
        read=reading.read_dna,
        crafted=lambda _: crafted.odd_names(b"@", b"\nACGTA\n+\nIIIII\n").items(),
    ),
    Reader(
        name="compressed streams",
        targets=tuple(material.compressed()),
        mutate=_mutate_compressed,
        read=reading.read_dna,
        crafted=lambda _: crafted.bombs(),
    ),
    Reader(
        name="protein FASTA",
        targets=("proteins.fa",),
        read=reading.read_protein,
        crafted=lambda _: (crafted.odd_names(b">", b"\nMKV\n") | crafted.fasta_layouts()).items(),
    ),
    Reader(
        name="tokenizer.json",
        targets=("dnabert/tokenizer.json",),
        read=reading.read_tokenizer,
        mutate=_json_or_bytes,
        crafted=lambda _: (hostile_json("model") | crafted.tokenizers()).items(),
    ),
    Reader(
        name="config.json",
        targets=("esm2/config.json", "dnabert/config.json"),
        read=reading.read_model,
        mutate=_json_or_bytes,
        crafted=_made_json("num_hidden_layers"),
    ),
    Reader(
        name="weight index",
        targets=("sharded/model.safetensors.index.json",),
        read=reading.read_model,
        mutate=_json_or_bytes,
        crafted=_made_json("weight_map"),
    ),
    Reader(
        name="safetensors",
        targets=("dnabert/model.safetensors", "sharded/*.safetensors"),
        read=reading.read_model,
        mutate=mutate_safetensors,
        crafted=lambda _: crafted.safetensors_headers().items(),
    ),
    Reader(
        name=".pt and .bin weights",
        targets=("esm2/pytorch_model.bin", "esm2_fair.pt"),
        read=reading.read_model,
        mutate=mutate_archive,
        crafted=_pickled_models,
        runs_code=True,
    ),
    Reader(
        name=".pth heads",
        targets=("head_module.pth", "head_state.pth"),
        read=reading.read_head,
        mutate=mutate_archive,
        crafted=_pickled_heads,
        runs_code=True,
    ),
    Reader(name="legacy .pth heads", targets=("head_legacy.pth",), read=reading.read_head, runs_code=True),
    Reader(
        name="safetensors heads",
        targets=("head.safetensors",),
        read=reading.read_head,
        mutate=mutate_safetensors,
        crafted=lambda _: crafted.safetensors_headers().items(),
    ),
    Reader(
        name="HDF5 shards",
        targets=("run/shards/*.h5",),
        read=reading.read_shard,
        mutate=mutate_hdf5,
        crafted=lambda _: crafted.hdf5_files(Path("run/shards/shard_00000.h5").read_bytes()).items(),
    ),
    Reader(
        name="embeddings.h5",
        targets=("run/embeddings.h5",),
        read=reading.read_embeddings,
        mutate=mutate_hdf5,
        crafted=lambda _: crafted.hdf5_files(Path("run/embeddings.h5").read_bytes()).items(),
    ),
    Reader(
        name="plan.json",
        targets=("run/plan.json",),
        read=reading.read_run,
        mutate=_json_or_bytes,
        crafted=_made_json("shards"),
    ),
    Reader(
        name="run.json",
        targets=("run/run.json",),
        read=reading.read_run,
        mutate=_json_or_bytes,
        crafted=_made_json("counts"),
    ),
    Reader(
        name="frame store",
        targets=("run/frames/*",),
        read=reading.read_store,
        mutate=_store_edits,
        crafted=_made_json("inputs"),
    ),
    Reader(
        name="lane journals",
        targets=("run/lanes/*.jsonl",),
        read=reading.read_journal,
        mutate=_mutate_lines,
        crafted=_made_json("time"),
    ),
    Reader(
        name="parameters",
        targets=("parameters.json",),
        read=parameters.read_parameters,
        mutate=parameters.mutate_parameters,
        spliced=False,
    ),
)
