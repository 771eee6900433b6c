"""The programs that models were published with, run on a checkpoint one sequence at a time in fp32."""

import contextlib
import gc
import math
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import CheckpointError, DeviceMemoryError, UsageError
from virnuc_core.models.esm2 import MASK_TOKEN
from virnuc_core.models.key_mapping import FAIR_ESM, recognise_layout
from virnuc_core.models.tensor_files import read_tensors
from virnuc_core.models.weights import Checkpoint, load_published, read_spec, tokenizer_path

_Embed = Callable[[str], Tensor]
# What these programs raise for a checkpoint that they cannot use.
_REFUSALS: Final = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class OriginalVectors:
    """What another program makes of sequences.

    Attributes:
        program: which one, its version, and what of it is ours.
        vectors: fp32 (N, D), mean vectors as virnuc defines them.
    """

    program: str
    vectors: npt.NDArray[np.float32]


def embed_with_original(checkpoint: Checkpoint, sequences: Sequence[str], device: str) -> OriginalVectors:
    """Mean vectors of the last layer by the program that the checkpoint is published for.

    fair-esm for its own layout, transformers' EsmModel for its own. The program of DNABERT-S is code in its authors'
    model repository, which virnuc never runs: transformers' BertModel stands in for it, with ALiBi as its attention mask
    and the gated feed-forward layer in the place of BERT's.

    Args:
        checkpoint: from `resolve_checkpoint`.
        sequences: proteins or DNA, upper case.
        device: torch device.

    Raises:
        CheckpointError: the program cannot load the checkpoint.
        DeviceMemoryError: the model does not fit the device in fp32.
        UsageError: the program is not installed, or there are no weights in a file.
    """
    if not checkpoint.files:
        raise UsageError(
            f"{checkpoint.name} has no files that another program could load: give a checkpoint."
        )
    if checkpoint.family == "dnabert_s":
        program, load = "transformers", _bert
    elif _is_fair_esm(checkpoint):
        program, load = "fair-esm", _fair_esm
    else:
        program, load = "transformers", _esm_model
    with _quiet():
        try:
            name, embed = load(checkpoint, device)
            with torch.inference_mode():
                vectors = [embed(sequence).float().cpu().numpy() for sequence in sequences]
        except ImportError as error:
            raise UsageError(
                f"comparing {checkpoint.name} needs {program}: pip install 'virnuc[reference]'."
            ) from error
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{program} has no room for {checkpoint.name} in fp32 on {device}: hide the GPU "
                "(CUDA_VISIBLE_DEVICES=) to compare on the CPU."
            ) from error
        except _REFUSALS as error:
            raise CheckpointError(f"{program} cannot run {checkpoint.name}: {error}.") from error
    del embed
    _release_memory()
    return OriginalVectors(name, np.stack(vectors))


def _is_fair_esm(checkpoint: Checkpoint) -> bool:
    return recognise_layout(read_tensors(checkpoint.files[0])[0]) is FAIR_ESM


def _fair_esm(checkpoint: Checkpoint, device: str) -> tuple[str, _Embed]:
    """fair-esm's own model, loader and tokens; only the file is read by virnuc, which runs no code in it."""
    try:
        load = import_module("esm.pretrained").load_model_and_alphabet_core
        version = import_module("esm").__version__
    except AttributeError as error:  # another package is imported by this name too
        raise ImportError(str(error)) from error
    spec = read_spec(checkpoint)
    arguments = Namespace(
        encoder_layers=spec.num_layers,
        encoder_embed_dim=spec.embedding_dim,
        encoder_attention_heads=spec.num_heads,
        token_dropout=spec.token_dropout,
    )
    tensors, _ = read_tensors(checkpoint.files[0])
    model, alphabet = load("esm2", {"cfg": {"model": arguments}, "model": tensors})
    model = model.eval().to(device)
    convert = alphabet.get_batch_converter()

    def embed(sequence: str) -> Tensor:
        tokens = convert([("", sequence)])[2].to(device)
        states = model(tokens, repr_layers=[spec.num_layers])["representations"][spec.num_layers]
        return _mean(states[0, 1:-1])

    return f"fair-esm {version}", embed


def _esm_model(checkpoint: Checkpoint, device: str) -> tuple[str, _Embed]:
    """Transformers' EsmModel on virnuc's token ids, which are those of fair-esm."""
    transformers = import_module("transformers")
    folder = checkpoint.files[0].parent
    model = transformers.EsmModel.from_pretrained(
        folder,
        add_pooling_layer=False,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        pad_token_id=1,
        mask_token_id=MASK_TOKEN,
    )
    model = model.eval().to(device)

    def embed(sequence: str) -> Tensor:
        tokens = _ids(Esm2Tokenizer().encode(ByteColumn.from_strings([sequence])), device)
        return _mean(model(input_ids=tokens).last_hidden_state[0, 1:-1])

    return f"transformers {transformers.__version__} (EsmModel)", embed


def _bert(checkpoint: Checkpoint, device: str) -> tuple[str, _Embed]:
    transformers = import_module("transformers")
    hidden_states = bert_with_alibi(checkpoint, device)
    tokenizer = DnabertTokenizer(tokenizer_path(checkpoint))

    def embed(sequence: str) -> Tensor:
        return _mean(hidden_states(_ids(tokenizer.encode(ByteColumn.from_strings([sequence])), device)))

    name = (
        f"transformers {transformers.__version__} (BertModel with ALiBi and gated feed-forward layers added)"
    )
    return name, embed


def bert_with_alibi(checkpoint: Checkpoint, device: str) -> Callable[[Tensor], Tensor]:
    """BertModel of transformers with the weights, the ALiBi and the feed-forward layer of DNABERT-S.

    Returns:
        A function from token ids, int64 (1, T), to the last hidden states, fp32 (T, D).

    Source: bert_layers.py of the DNABERT-S authors; Press et al. 2022 for the slopes.
    """
    transformers = import_module("transformers")
    spec, parts = load_published(checkpoint)
    config = transformers.BertConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.embedding_dim,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        intermediate_size=2 * spec.ffn_dim,
        max_position_embeddings=1,
        layer_norm_eps=spec.layer_norm_eps,
        attn_implementation="eager",
    )
    model = transformers.BertModel(config, add_pooling_layer=False).float()
    weights = {name: torch.cat(tensors).float() for name, tensors in parts.items()}
    state = {
        "embeddings.word_embeddings.weight": weights["word_embeddings.weight"],
        "embeddings.token_type_embeddings.weight": weights["token_type_embedding"][:1].expand(2, -1),
        "embeddings.position_embeddings.weight": torch.zeros(1, spec.embedding_dim),
        **_pair("embeddings.LayerNorm", weights, "embedding_norm"),
    }
    for n, layer in enumerate(model.encoder.layer):
        theirs, ours = f"encoder.layer.{n}.", f"layers.{n}."
        for kind in ("weight", "bias"):
            thirds = weights[f"{ours}qkv.{kind}"].chunk(3)
            for name, third in zip(("query", "key", "value"), thirds, strict=True):
                state[f"{theirs}attention.self.{name}.{kind}"] = third
        state |= _pair(f"{theirs}attention.output.dense", weights, f"{ours}attention_out")
        state |= _pair(f"{theirs}attention.output.LayerNorm", weights, f"{ours}attention_norm")
        state[f"{theirs}intermediate.dense.weight"] = weights[f"{ours}ffn_in.weight"]
        state[f"{theirs}intermediate.dense.bias"] = torch.zeros(2 * spec.ffn_dim)
        state |= _pair(f"{theirs}output.dense", weights, f"{ours}ffn_out")
        state |= _pair(f"{theirs}output.LayerNorm", weights, f"{ours}ffn_norm")
        layer.intermediate.intermediate_act_fn = _Gate()
        layer.output.dense = nn.Linear(spec.ffn_dim, spec.embedding_dim)
    model.load_state_dict(state)
    model = model.eval().to(device)
    slopes = torch.tensor(_slopes(spec.num_heads), device=device)[:, None, None]

    def hidden_states(tokens: Tensor) -> Tensor:
        index = torch.arange(tokens.shape[1], device=device)
        alibi = -slopes * (index[:, None] - index).abs()
        output = model(input_ids=tokens, attention_mask=alibi[None], position_ids=torch.zeros_like(tokens))
        states: Tensor = output.last_hidden_state[0]
        return states

    return hidden_states


def _pair(theirs: str, weights: dict[str, Tensor], ours: str) -> dict[str, Tensor]:
    return {f"{theirs}.{kind}": weights[f"{ours}.{kind}"] for kind in ("weight", "bias")}


class _Gate(nn.Module):
    """gelu(first half) * second half."""

    def forward(self, inner: Tensor) -> Tensor:
        first, second = inner.chunk(2, dim=-1)
        return functional.gelu(first) * second


def _slopes(num_heads: int) -> list[float]:
    """As in the paper's code, which goes by powers of two; not those of `models.positions`, which are under test."""
    if math.log2(num_heads).is_integer():
        return [2 ** (-8 * (i + 1) / num_heads) for i in range(num_heads)]
    below = 2 ** int(math.log2(num_heads))
    return _slopes(below) + _slopes(2 * below)[::2][: num_heads - below]


def _ids(tokens: TokenColumn, device: str) -> Tensor:
    return torch.from_numpy(tokens.input_ids.astype(np.int64))[None].to(device)


def _mean(states: Tensor) -> Tensor:
    return states.float().mean(0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and progress bars of loading, which say nothing of the vectors."""
    with contextlib.suppress(ImportError):
        logging: Any = import_module("transformers.utils.logging")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _release_memory() -> None:
    """Gives the device back to the processes that compute next."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
