"""Attention kernels on a GPU: virnuc's, flash-attn-4, FlashAttention 3 of fa3-fwd, and torch's.

    python -m benchmarks.flash_attention [--out FILE.json] [--seconds S] [--device 0]

Attention alone is timed as a layer calls it, from the fused QKV buffer, and without the rotation for kernels that do not
include it. Every value is the median of a few measurements of at least S seconds, and every result is compared with plain
fp32 softmax. Forward passes are those of whole models with random weights; the candidates take turns on the same batches.
A candidate that fails or is not installed is recorded with the reason. Writes benchmarks/results/flash_attention.json.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.reports import Json, command_of, options_of, write_report
from virnuc_core.benchmark.forward import BatchSet, rounds_per_second, synchronize
from virnuc_core.benchmark.run import machine
from virnuc_core.benchmark.settings import Lengths
from virnuc_core.benchmark.synthetic import draw_lengths
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.planning import plan_models
from virnuc_core.models.attention import PackedLayout, VarlenAttention, resolve_attention
from virnuc_core.models.attention_plain import split_qkv
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.settings import RunConfig
from virnuc_core.specs import AttentionBackend, AttentionChoice, Family, ResolvedPrecision
from virnuc_core.versions import FLASH_ATTN, installed_version

BACKENDS: Final[dict[str, AttentionChoice]] = {
    "triton": "triton",
    FLASH_ATTN: "flash-attn",
    "torch varlen": "varlen",
}
PRECISIONS: Final[dict[ResolvedPrecision, torch.dtype]] = {"fp16": torch.float16, "bf16": torch.bfloat16}
PACKAGES: Final = (FLASH_ATTN, "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "fa3-fwd")
# Tokens per batch: for attention alone, and for whole models, with eight batches per round.
_TOKENS, _FORWARD_TOKENS = 65_536, 16_384
_REPEATS, _FORWARD_REPEATS = 5, 3
_CALLS: Final = 10  # attention calls per measured step

Attention = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Fa3Attention:
    """FlashAttention 3 of fa3-fwd, without ALiBi; attributes as in `VarlenAttention`."""

    cu_seqlens: Tensor
    max_seqlen: int
    table: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        from fa3_fwd_interface import flash_attn_varlen_func

        q, k, v = split_qkv(qkv, self.table)
        bounds, longest = self.cu_seqlens, self.max_seqlen
        output: Tensor = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest)
        return output.flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Heads of a model and lengths of its sequences."""

    model: str
    family: Family
    heads: int
    head_dim: int
    lengths: str


SHAPES: Final = (
    *(
        Shape(model=model, family="esm2", heads=heads, head_dim=64, lengths=lengths)
        for model, heads in (("650M", 20), ("3B", 40))
        for lengths in ("fixed:166", "lognormal")
    ),
    Shape(model="DNABERT-S", family="dnabert_s", heads=12, head_dim=64, lengths="tokens:106"),
)


def bounds_of(shape: Shape, num_tokens: int) -> np.ndarray:
    """int32 (B + 1,): sequences with special tokens, `num_tokens` at most in total."""
    lengths = Lengths.parse(shape.lengths)
    special = 0 if lengths.kind == "tokens" else 2
    drawn = draw_lengths(lengths, num_tokens, np.random.default_rng(0)) + special
    bounds = np.concatenate(([0], np.cumsum(drawn)))
    return bounds[bounds <= num_tokens].astype(np.int32)


def layout_of(
    backend: AttentionBackend, shape: Shape, bounds: np.ndarray, precision: ResolvedPrecision, device: str
) -> PackedLayout:
    """The layout as a model of this shape builds it."""
    positions = (
        {"rotary_head_dim": shape.head_dim} if shape.family == "esm2" else {"alibi_heads": shape.heads}
    )
    place = {"device": torch.device(device), "dtype": PRECISIONS[precision]}
    return PackedLayout.build(bounds, backend=backend, **place, **positions)  # type: ignore[arg-type]


def attention_of(
    candidate: str, shape: Shape, bounds: np.ndarray, precision: ResolvedPrecision, device: str
) -> Attention:
    """The attention of a candidate for a batch.

    Raises:
        UsageError: it does not support this, or is not installed.
    """
    if candidate != "fa3-fwd":
        backend = resolve_attention(BACKENDS[candidate], device, shape.family, precision, shape.head_dim)
        return layout_of(backend, shape, bounds, precision, device).attention
    if shape.family != "esm2":
        raise ValueError("it has no ALiBi")
    varlen = layout_of("varlen", shape, bounds, precision, device).attention
    assert isinstance(varlen, VarlenAttention)
    return Fa3Attention(varlen.cu_seqlens, varlen.max_seqlen, varlen.table)


def milliseconds(attention: Attention, qkv: Tensor, seconds: float, device: str) -> Json:
    """Median, spread and all measurements of one call."""

    def step() -> None:
        for _ in range(_CALLS):
            attention(qkv)

    step()
    rates = [rounds_per_second([step], seconds, device) for _ in range(_REPEATS)]
    return summary("ms", [1000 / _CALLS / rate for rate in rates])


def summary(unit: str, repeats: list[float]) -> Json:
    """Median, all measurements, and their range over the median."""
    median = statistics.median(repeats)
    return {unit: median, "repeats": repeats, "spread": (max(repeats) - min(repeats)) / median}


def attention_rows(shape: Shape, precision: ResolvedPrecision, seconds: float, device: str) -> Iterator[Json]:
    """One row per candidate: as a layer calls it, and without the rotation where that is separate."""
    bounds = bounds_of(shape, _TOKENS)
    num_tokens = int(bounds[-1])
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(num_tokens, 3, shape.heads, shape.head_dim, device=device, generator=generator)
    qkv = qkv.to(PRECISIONS[precision])
    expected = layout_of("reference", shape, bounds, precision, device).attention(qkv.float()).double()
    what = {"model": shape.model, "lengths": shape.lengths, "precision": precision, "tokens": num_tokens}
    for candidate in (*BACKENDS, "fa3-fwd"):
        row = {"candidate": candidate, **what, "heads": shape.heads, "head_dim": shape.head_dim}
        with recording_failure(row):
            attention = attention_of(candidate, shape, bounds, precision, device)
            row["relative_error"] = float((attention(qkv).double() - expected).norm() / expected.norm())
            row["as_called"] = milliseconds(attention, qkv, seconds, device)
            if candidate != "triton" and shape.family == "esm2":
                kernel: Attention = replace(attention, table=None)  # type: ignore[type-var]
                row["without_rotation"] = milliseconds(kernel, qkv, seconds, device)
        yield row


def forward_rows(name: str, precision: ResolvedPrecision, seconds: float, device: str) -> Iterator[Json]:
    """One row per backend and length distribution; they take turns on the same batches."""
    config = RunConfig(
        chunk_length=None,
        esm_model=f"random:{name}",
        dnabert_model=None,
        precision=precision,
        devices=(device,),
        token_budget=_FORWARD_TOKENS,
    )
    [planned] = plan_models(config, (device,), None)
    model = load_model(open_checkpoint(planned.location, planned.family), device, precision)
    for lengths in ("fixed:166", "lognormal"):
        what = {"model": name, "lengths": lengths, "precision": precision}
        prepared: dict[str, tuple[list[Callable[[], Tensor]], int]] = {}
        for candidate, choice in BACKENDS.items():
            row = {"candidate": candidate, **what}
            with recording_failure(row):
                backend = resolve_attention(choice, device, planned.family, precision, planned.spec.head_dim)
                made = BatchSet.make(
                    replace(planned, attention=backend), model, Lengths.parse(lengths), device
                )
                steps = made.steps(model, planned.repr_layer)
                for step in steps:  # warm-up: builds tables and kernels for the longest sequence
                    step()
                synchronize(device)
                prepared[candidate] = (steps, made.work.tokens)
            if "failed" in row:
                yield row
        rates: dict[str, list[float]] = {candidate: [] for candidate in prepared}
        for _ in range(_FORWARD_REPEATS):
            for candidate, (steps, num_tokens) in prepared.items():
                rates[candidate].append(rounds_per_second(steps, seconds, device) * num_tokens)
        for candidate, repeats in rates.items():
            yield {"candidate": candidate, **what, **summary("tokens_per_second", repeats)}


@contextmanager
def recording_failure(row: Json) -> Iterator[None]:
    """Records a failure of the block in the row, in one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def measure(seconds: float, device: str) -> Iterator[tuple[str, Json]]:
    """Every row, with its section of the report."""
    with torch.inference_mode():
        for shape, precision in product(SHAPES, PRECISIONS):
            for row in attention_rows(shape, precision, seconds, device):
                yield "attention", row
        for name, precision in product(("650M", "3B"), PRECISIONS):
            for row in forward_rows(name, precision, seconds, device):
                yield "forward", row
            torch.cuda.empty_cache()


def main() -> None:
    """Command line."""
    parser = options_of("flash_attention", __doc__)
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="minimum length of one measurement [0.05]"
    )
    parser.add_argument("--device", default="0")
    arguments = parser.parse_args()
    device = resolve_devices((arguments.device,))[0]
    torch.cuda.set_device(device)
    packages = {name: installed_version(name) for name in PACKAGES}
    report: Json = {
        "kind": "flash-attention",
        "command": command_of("flash_attention"),
        "machine": machine(device) | {"packages": packages},
        "attention": [],
        "forward": [],
    }
    for part, row in measure(arguments.seconds, device):
        report[part].append(row)
        print(json.dumps(row), flush=True)
        write_report(report, arguments.out)


if __name__ == "__main__":
    main()
