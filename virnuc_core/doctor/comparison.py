"""A checkpoint in virnuc against the program that it was published for, on the same eight real sequences.

The other program computes one sequence at a time in fp32: fair-esm for its own layout, transformers' EsmModel for its
own. That of DNABERT-S is code in its authors' model repository, which virnuc never runs: transformers' BertModel stands
in for it, with ALiBi as its attention mask and the gated feed-forward layer in the place of BERT's.
"""

import math
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.api import embed
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.columns import ByteColumn, Float32, Float64
from virnuc_core.errors import CheckpointError, DeviceError, UsageError
from virnuc_core.inference.device import resolve_devices, resolve_precision
from virnuc_core.models.checkpoint import FAIR_ESM, Checkpoint
from virnuc_core.models.encoders import MASK_TOKEN
from virnuc_core.models.hub import family_of, open_checkpoint
from virnuc_core.models.tensor_files import read_tensors
from virnuc_core.plain_text import visible
from virnuc_core.sequences.reader import iter_records
from virnuc_core.specs import Engine, ResolvedPrecision

# Rounding stays above these (measurements in docs/performance.md); wrong results are far below.
_LEAST_COSINES: Final[dict[ResolvedPrecision, float]] = {
    "fp32": 0.999999,
    "fp16": 0.9999,
    "bf16": 0.999,
    "fp8": 0.99,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """virnuc's vectors in one precision against those of the other program."""

    engine: Engine
    precision: ResolvedPrecision
    largest_difference: float
    largest_value: float
    least_cosine: float
    is_same: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelComparison:
    """The result of a comparison; `is_same` within rounding."""

    model: str
    program: str
    device: str
    num_sequences: int
    runs: tuple[ComparedRun, ...]
    is_same: bool

    @property
    def summary(self) -> str:
        """For the terminal, the verdict last."""
        lines = [
            f"{self.model}: virnuc against {self.program} in fp32 on {self.device}, {self.num_sequences} real sequences",
            "engine     precision  largest difference  (largest value)  lowest cosine",
            *(
                f"{run.engine:<9}  {run.precision:<9}  {run.largest_difference:<18.3g}  {run.largest_value:<15.4g}  "
                f"{run.least_cosine:.8f}    {'same' if run.is_same else 'DIFFERS'}"
                for run in self.runs
            ),
            f"verdict: {'the same within rounding' if self.is_same else 'NOT the same'}",
        ]
        return visible("\n".join(lines))


def compare_model(model: str) -> ModelComparison:
    """Compares mean vectors by virnuc, in every precision of this machine, with those of the original program.

    Raises:
        CheckpointError: virnuc or the other program cannot use the checkpoint.
        DeviceError: a device failed.
        UsageError: the other program is not installed, or the name is that of two models.
    """
    family, name = family_of(model)
    checkpoint = open_checkpoint(name, family)
    # Pieces of examples/contigs.fa.gz of 60 to 3,000 bases, and the longest ORF of each.
    fasta = Path(__file__).with_name(f"{family}.fa")
    records = iter_records([fasta], "protein" if family == "esm2" else "dna")
    sequences = [record.sequence.decode() for record in records]
    device = resolve_devices(("auto",))[0]
    program, expected = _embed_with_original(checkpoint, sequences, device)
    runs = []
    variants: list[tuple[Engine, ResolvedPrecision]] = [("reference", "fp32")]
    variants += [("packed", precision) for precision in _LEAST_COSINES]
    for engine, wanted in variants:
        with suppress(DeviceError):  # not on this device
            precision = resolve_precision(wanted, device)
            options = {"devices": (device.removeprefix("cuda:"),), "engine": engine, "precision": precision}
            runs.append(compare_vectors(embed(sequences, model, **options), expected, engine, precision))
    return ModelComparison(
        model=model,
        program=program,
        device=device,
        num_sequences=len(sequences),
        runs=tuple(runs),
        is_same=all(run.is_same for run in runs),
    )


def compare_vectors(
    found: Float32, expected: Float32, engine: Engine, precision: ResolvedPrecision
) -> ComparedRun:
    """Compares vectors (N, D) with those of the other program."""
    difference, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    cosine = float(cosines(found, expected).min())
    # NaN compares as false.
    is_close = precision != "fp32" or difference <= 1e-4 * largest
    return ComparedRun(
        engine=engine,
        precision=precision,
        largest_difference=difference,
        largest_value=largest,
        least_cosine=cosine,
        is_same=cosine >= _LEAST_COSINES[precision] and is_close,
    )


def cosines(left: Float32, right: Float32) -> Float64:
    """Cosines of the rows of two matrices (N, D), float64 (N,)."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    return np.asarray((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1)))


def _embed_with_original(checkpoint: Checkpoint, sequences: list[str], device: str) -> tuple[str, Float32]:
    """Name and version of the program that the checkpoint is published for, and its mean vectors, fp32 (N, D)."""
    name = checkpoint.name
    if not checkpoint.files:
        raise UsageError(f"{name} has no files that another program can load: give a checkpoint.")
    package, load = "transformers", _bert_with_alibi if checkpoint.family == "dnabert_s" else _esm_model
    if checkpoint.layout is FAIR_ESM:
        package, load = "fair-esm", _fair_esm
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            program, hidden_states = load(checkpoint, device)
            vectors = [hidden_states(sequence).float().mean(0).cpu().numpy() for sequence in sequences]
    except ImportError as error:
        raise UsageError(f"comparing {name} needs {package}: pip install 'virnuc[reference]'.") from error
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{package} cannot run {name}: {error}.") from error
    del hidden_states  # the lanes that compute next need the device's memory
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return program, np.stack(vectors)


# The loaders give the name of a program, and what computes the hidden states (T, D) of the residues or tokens of a sequence.


def _fair_esm(checkpoint: Checkpoint, device: str) -> tuple[str, Callable[[str], Tensor]]:
    """fair-esm's own model, loader and tokens; virnuc reads the file, so that no code in it is run."""
    try:
        load = import_module("esm.pretrained").load_model_and_alphabet_core
        version = import_module("esm").__version__
    except AttributeError as error:  # another package is imported by this name too
        raise ImportError(str(error)) from error
    spec = checkpoint.spec
    arguments = Namespace(
        encoder_layers=spec.num_layers,
        encoder_embed_dim=spec.embedding_dim,
        encoder_attention_heads=spec.num_heads,
        token_dropout=spec.token_dropout,
    )
    tensors = read_tensors(checkpoint.files[0])
    model, alphabet = load("esm2", {"cfg": {"model": arguments}, "model": tensors})
    model = model.eval().to(device)
    convert, last = alphabet.get_batch_converter(), spec.num_layers

    def hidden_states(sequence: str) -> Tensor:
        tokens = convert([("", sequence)])[2].to(device)
        states: Tensor = model(tokens, repr_layers=[last])["representations"][last]
        return states[0, 1:-1]

    return f"fair-esm {version}", hidden_states


def _esm_model(checkpoint: Checkpoint, device: str) -> tuple[str, Callable[[str], Tensor]]:
    """Transformers' EsmModel on virnuc's token ids, which are those of fair-esm."""
    transformers = _transformers()
    model = transformers.EsmModel.from_pretrained(
        checkpoint.files[0].parent,
        add_pooling_layer=False,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        pad_token_id=1,
        mask_token_id=MASK_TOKEN,
    )
    model = model.eval().to(device)

    def hidden_states(sequence: str) -> Tensor:
        states: Tensor = model(input_ids=_input_ids(Esm2Tokenizer(), sequence, device)).last_hidden_state
        return states[0, 1:-1]

    return f"transformers {transformers.__version__} (EsmModel)", hidden_states


def _bert_with_alibi(checkpoint: Checkpoint, device: str) -> tuple[str, Callable[[str], Tensor]]:
    """BertModel of transformers with the weights, ALiBi and feed-forward of DNABERT-S.

    Source: bert_layers.py of the DNABERT-S authors; Press et al. 2022 for the slopes.
    """
    transformers, spec = _transformers(), checkpoint.spec
    config = transformers.BertConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.embedding_dim,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        intermediate_size=spec.ffn_dim,
        max_position_embeddings=1,
        layer_norm_eps=spec.layer_norm_eps,
        attn_implementation="eager",
    )
    model = transformers.BertModel(config, add_pooling_layer=False).float()
    for layer in model.encoder.layer:
        layer.intermediate.dense = nn.Linear(spec.embedding_dim, 2 * spec.ffn_dim, bias=False)
        layer.intermediate.intermediate_act_fn = _Gate()
    state = {"embeddings.position_embeddings.weight": torch.zeros(1, spec.embedding_dim)}
    for name, values in checkpoint.tensors.items():
        name = name.replace("mlp.gated_layers", "intermediate.dense").replace("mlp.wo", "output.dense")
        name = name.replace("mlp.layernorm", "output.LayerNorm")
        parts = ("query", "key", "value") if "Wqkv" in name else ("Wqkv",)
        for part, rows in zip(parts, values.float().chunk(len(parts)), strict=True):
            state[name.replace("Wqkv", part)] = rows
    model.load_state_dict({name: state[name] for name in model.state_dict() if name in state})
    model = model.eval().to(device)
    # As in the paper's code; independent of `models.attention`, which is under test.
    whole = 2 ** int(math.log2(spec.num_heads))
    exponents = [i + 1.0 for i in range(whole)] + [i + 0.5 for i in range(spec.num_heads - whole)]
    slopes = torch.tensor([2 ** (-8 * i / whole) for i in exponents], device=device)[:, None, None]

    def hidden_states(sequence: str) -> Tensor:
        tokens = _input_ids(checkpoint.tokenizer, sequence, device)
        index = torch.arange(tokens.shape[1], device=device)
        alibi = -slopes * (index[:, None] - index).abs()
        output = model(input_ids=tokens, attention_mask=alibi[None], position_ids=torch.zeros_like(tokens))
        states: Tensor = output.last_hidden_state[0]
        return states

    version = transformers.__version__
    return f"transformers {version} (BertModel with ALiBi and gated feed-forward layers added)", hidden_states


class _Gate(nn.Module):
    """gelu(first half) * second half."""

    def forward(self, inner: Tensor) -> Tensor:
        first, second = inner.chunk(2, dim=-1)
        return functional.gelu(first) * second


def _input_ids(tokenizer: Esm2Tokenizer | DnabertTokenizer, sequence: str, device: str) -> Tensor:
    """int64 (1, T)."""
    tokens = tokenizer.encode(ByteColumn.from_strings([sequence]))
    return torch.from_numpy(tokens.input_ids.astype(np.int64))[None].to(device)


def _transformers() -> Any:
    """The package, without its progress bars."""
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
