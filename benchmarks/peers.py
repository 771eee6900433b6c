"""ESM-2 on a GPU: virnuc against fair-esm, transformers and esm-efficient, in one run on one device.

    python -m benchmarks.peers [--model 650M] [--model 3B] [--precision fp16,fp8] [--lengths fixed:166] [--device 0]

Writes benchmarks/results/peers.json. Random weights of the true architectures, real residues counted (no
padding, no special tokens). A peer gets sequences sorted by length, in batches of a number of tokens, padding
included, and is quoted at the best of a few such numbers; its clock runs from strings to mean vectors on the
host, as its users call it. virnuc is measured by its own benchmark: forward passes alone.
A peer that is not installed is left out, with that reason.
"""

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import forward
from benchmarks.reports import Json, command_of, options_of, write_report
from virnuc_core.inference.device import resolve_devices
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.specs import ModelSpec
from virnuc_core.versions import installed_version

NUM_SEQUENCES = 4096
FIRST_RESIDUE, RESIDUES = 4, "LAGVSERTIDPKQNFYMHWC"
PAD, MASK = 1, 32

Batch = list[str]
Embed = Callable[[Batch], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation, of a package that must be installed.

    `budgets` are tokens per batch, padding included; `load` takes architecture and device, and gives a function from
    strings to mean vectors on the host.
    """

    name: str
    package: str
    budgets: tuple[int, ...]
    load: Callable[[ModelSpec, str], Embed]


def fair_esm_model(spec: ModelSpec, device: str) -> Any:
    import esm

    with torch.device(device):
        model = esm.model.esm2.ESM2(
            num_layers=spec.num_layers,
            embed_dim=spec.embedding_dim,
            attention_heads=spec.num_heads,
            alphabet="ESM-1b",
            token_dropout=True,
        )
    return model.eval()


def hugging_face_model(spec: ModelSpec, device: str) -> nn.Module:
    """EsmModel of transformers with its default (SDPA) attention, in evaluation mode."""
    from transformers import EsmConfig, EsmModel

    config = EsmConfig(
        vocab_size=spec.vocab_size,
        mask_token_id=MASK,
        pad_token_id=PAD,
        hidden_size=spec.embedding_dim,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        intermediate_size=spec.ffn_dim,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
    )
    with torch.device(device):
        model: nn.Module = EsmModel(config, add_pooling_layer=False)
    return model.eval()


def fair_esm(spec: ModelSpec, device: str, dtype: torch.dtype) -> Embed:
    """fair-esm's model and batch converter, with the mean per sequence as in its README."""
    model = fair_esm_model(spec, device).to(dtype)
    convert = model.alphabet.get_batch_converter()

    def embed(batch: Batch) -> list[torch.Tensor]:
        _, strings, tokens = convert([("", sequence) for sequence in batch])
        output = model(tokens.to(device), repr_layers=[spec.num_layers])
        states = output["representations"][spec.num_layers]
        return [states[i, 1 : len(string) + 1].mean(0).cpu() for i, string in enumerate(strings)]

    return embed


def hugging_face(spec: ModelSpec, device: str, dtype: torch.dtype) -> Embed:
    """EsmModel of transformers with its default (SDPA) attention, tokenized by a table and pooled on the device."""
    model = hugging_face_model(spec, device).to(dtype)
    table = np.zeros(128, np.int64)
    table[[ord(letter) for letter in RESIDUES]] = FIRST_RESIDUE + np.arange(len(RESIDUES))

    def embed(batch: Batch) -> torch.Tensor:
        ids = np.full((len(batch), max(map(len, batch)) + 2), PAD)
        for row, sequence in zip(ids, batch, strict=True):
            row[0], row[len(sequence) + 1] = 0, 2
            row[1 : len(sequence) + 1] = table[np.frombuffer(sequence.encode(), np.uint8)]
        input_ids = torch.from_numpy(ids).to(device)
        states = model(input_ids=input_ids, attention_mask=(input_ids != PAD).long()).last_hidden_state
        is_residue = (input_ids >= FIRST_RESIDUE).unsqueeze(2)
        means: torch.Tensor = (states * is_residue).sum(1) / is_residue.sum(1)
        return means.float().cpu()

    return embed


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: object,
) -> Tensor:
    """Attention of packed sequences, (T, N, H) in and out; supports only causal=False."""
    if options.get("causal"):
        raise NotImplementedError("the stand-in for flash_attn has bidirectional attention only")
    lengths = (int(max_seqlen_q), int(max_seqlen_k))
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths, 0.0, False, False, scale=q.shape[-1] ** -0.5
    )[0]
    return output


def needs_stand_in() -> bool:
    return not installed_version("flash-attn")


def provide_flash_attn() -> None:
    """Makes `import flash_attn` work where only torch is installed: over its kernel, with what esm-efficient calls."""
    if needs_stand_in():
        package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
        package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
        vars(padding).update(pad_input=None, unpad_input=None)  # imported, never called on packed input
        vars(package).update(__version__="2.8.3", __path__=[])
        vars(package).update(flash_attn_varlen_func=varlen_attention, bert_padding=padding)
        sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}


def esm_efficient(spec: ModelSpec, device: str) -> Embed:
    """esm-efficient on packed tokens, in the bf16 that it is made for."""
    provide_flash_attn()
    from esme.alphabet import tokenize_unpad
    from esme.esm import ESM2

    with torch.device(device):
        model = ESM2(num_layers=spec.num_layers, embed_dim=spec.embedding_dim, attention_heads=spec.num_heads)
    model = model.to(device).eval()

    def embed(batch: Batch) -> torch.Tensor:
        tokens, _, bounds, longest = tokenize_unpad(batch)
        packed = (bounds.to(device, torch.int32), int(longest))
        states = model.forward_representation(tokens.to(device), packed)
        ends = bounds.tolist()
        means = [states[a + 1 : b - 1].mean(0) for a, b in pairwise(ends)]
        return torch.stack(means).float().cpu()

    return embed


PEERS = (
    Peer("fair-esm fp32", "esm", (2048,), partial(fair_esm, dtype=torch.float32)),
    Peer("fair-esm fp16", "esm", (8192, 65536), partial(fair_esm, dtype=torch.float16)),
    Peer("transformers fp16", "transformers", (16384, 65536), partial(hugging_face, dtype=torch.float16)),
    Peer("esm-efficient bf16", "esme", (16384, 65536), esm_efficient),
)


def batches_of(sequences: Batch, budget: int) -> list[Batch]:
    """Length-sorted batches of at most `budget` tokens with padding, in random order."""
    batches: list[Batch] = []
    for sequence in sorted(sequences, key=len):
        if not batches or (len(sequence) + 2) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(sequence)
    order = np.random.default_rng(0).permutation(len(batches))
    return [batches[i] for i in order]


def residues_per_second(embed: Embed, batches: list[Batch], seconds: float) -> float:
    """Residues per second over at least `seconds`, after warming up with the longest and the shortest batch."""
    for batch in (max(batches, key=lambda b: len(b[-1])), min(batches, key=lambda b: len(b[-1]))):
        embed(batch)
    started = time.perf_counter()
    residues = done = 0
    while time.perf_counter() - started < seconds:
        batch = batches[done % len(batches)]
        embed(batch)
        residues += sum(map(len, batch))
        done += 1
    return residues / (time.perf_counter() - started)


def measure_peer(
    peer: Peer, name: str, sequences: dict[str, Batch], device: str, seconds: float
) -> Iterator[Json]:
    if importlib.util.find_spec(peer.package) is None:
        yield {"peer": peer.name, "model": name, "skipped": f"{peer.package} is not installed"}
        return
    embed = peer.load(open_checkpoint(f"random:{name}", "esm2").spec, device)
    for lengths, strings in sequences.items():
        rates: dict[int, float | None] = {}
        for budget in peer.budgets:
            try:
                rates[budget] = residues_per_second(embed, batches_of(strings, budget), seconds)
            except torch.OutOfMemoryError:
                rates[budget] = None
            free_memory()
        best = max((rate for rate in rates.values() if rate is not None), default=None)
        row = {"peer": peer.name, "model": name, "lengths": lengths, "residues_per_second": best}
        yield {**row, "by_tokens_in_a_batch": rates}


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(name: str, arguments: argparse.Namespace, device: str) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    sequences = {}
    for lengths in arguments.lengths.split(","):
        drawn = forward.draw_lengths(lengths, NUM_SEQUENCES, rng)
        sequences[lengths] = forward.random_sequences("esm2", drawn, rng).to_strings()
    rows = []
    with torch.inference_mode():
        for peer in PEERS:
            for row in measure_peer(peer, name, sequences, device, arguments.seconds):
                print(json.dumps(row), flush=True)
                rows.append(row)
            free_memory()
    options = forward.parse(
        [
            *("--model", f"esm2:random:{name}", "--precision", arguments.precision),
            *("--lengths", arguments.lengths, "--devices", arguments.device),
            *("--seconds", str(arguments.seconds), "--repeats", str(arguments.repeats)),
        ]
    )
    return rows, forward.measure(options)


def main() -> None:
    parser = options_of("peers", __doc__)
    parser.add_argument("--model", action="append", help="catalogue name, several times [650M and 3B]")
    parser.add_argument("--precision", default="fp16,fp8")
    parser.add_argument("--lengths", default="fixed:166,lognormal")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = resolve_devices((arguments.device,))[0]
    report: Json = {
        "kind": "peers",
        "command": command_of("peers"),
        "machine": forward.machine(device),
        "stand_in_for_flash_attn": needs_stand_in(),
        "peers": [],
        "cases": [],
    }
    for name in arguments.model or ["650M", "3B"]:
        rows, cases = measure(name, arguments, device)
        report["peers"] += rows
        report["cases"] += cases
        write_report(report, arguments.out)


if __name__ == "__main__":
    main()
