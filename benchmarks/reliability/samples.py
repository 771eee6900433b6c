"""Small valid files of what virnuc reads: sequences in every layout and compression, tokenizers, models and heads."""

import argparse
import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import torch
from backports import zstd
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from virnuc_core.models.checkpoint import (
    DNABERT,
    FAIR_ESM,
    TOKEN_TYPE,
    TRANSFORMERS_ESM,
    KeyLayout,
    config_sizes,
    parameter_shapes,
)
from virnuc_core.models.classifier import MLPClassifier
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
    **{
        **asdict(_ESM2),
        "family": "dnabert_s",
        "vocab_size": 13,
        "layer_norm_eps": 1e-12,
        "token_dropout": False,
    }
)
# The empty final block of bgzip files.
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


COMPRESSIONS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gz": partial(gzip.compress, mtime=0),
    "bgz": bgzip,
    "zst": zstd.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}


def sequence_files() -> dict[str, bytes]:
    """Sequences by file name."""
    data, reads, compress = fasta(), fastq(), COMPRESSIONS["gz"]
    return {
        "in.fa": data,
        "in.fq": reads,
        "proteins.fa": fasta("ACDEFGHIKLMNPQRSTVWY"),
        **{f"in.fa.{suffix}": compress(data) for suffix, compress in COMPRESSIONS.items()},
        "two.fa.gz": compress(data) + compress(data),
        "reads.fq.gz": compress(reads),
    }


def tokenizer(words: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Byte pairs of a few DNA words, whose ids are their places; [CLS] is 1 and [SEP] 2."""
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), unk_token="[UNK]"))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def make_tokenizer(path: Path) -> None:
    """Byte pairs of a few DNA words, with the ids of the published special tokens."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "A", "C", "G", "T", "AC", "GT", "AA", "ACGT"]
    made = tokenizer(words, [("A", "C"), ("G", "T"), ("A", "A"), ("AC", "GT")])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))


def random_weights(
    spec: ModelSpec, layout: KeyLayout, std: float = 0.1, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random weights under published names."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(spec).items():
        sources = layout.sources(name)
        rows = (2, *shape) if name == TOKEN_TYPE else (shape[0] // len(sources), *shape[1:])
        for source in sources:
            state[source] = torch.randn(rows, generator=generator) * std
    return state


def _model_folder(folder: Path, spec: ModelSpec) -> Path:
    folder.mkdir()
    config = {
        **config_sizes(spec),
        "position_embedding_type": "rotary",
        "token_dropout": spec.token_dropout,
        "emb_layer_norm_before": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_models(folder: Path) -> None:
    """`esm2_fair.pt`, `esm2/`, `dnabert/`, `sharded/` and the heads `head.*`."""
    arguments = argparse.Namespace(
        encoder_layers=2, encoder_embed_dim=_WIDTH, encoder_attention_heads=2, token_dropout=True, arch="esm2"
    )
    model = {f"encoder.sentence_encoder.{n}": t for n, t in random_weights(_ESM2, FAIR_ESM).items()}
    torch.save({"cfg": {"model": arguments}, "model": model}, folder / "esm2_fair.pt")
    state = random_weights(_ESM2, TRANSFORMERS_ESM)
    torch.save(state, _model_folder(folder / "esm2", _ESM2) / "pytorch_model.bin")

    dnabert = _model_folder(folder / "dnabert", _DNABERT)
    save_file(random_weights(_DNABERT, DNABERT), dnabert / "model.safetensors")
    make_tokenizer(dnabert / "tokenizer.json")

    sharded = _model_folder(folder / "sharded", _ESM2)
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(state))}
    for file in set(weight_map.values()):
        save_file({name: state[name] for name in state if weight_map[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _make_heads(folder)


def _make_heads(folder: Path) -> None:
    head = MLPClassifier(2 * _WIDTH, 8)
    save_file(head.state_dict(), folder / "head.safetensors")
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
