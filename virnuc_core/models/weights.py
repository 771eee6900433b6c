"""A checkpoint's architecture and weights, whatever published layout they come in."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.errors import CheckpointError
from virnuc_core.files import parse_object
from virnuc_core.models.key_mapping import (
    FAIR_ESM,
    TOKEN_TYPE,
    KeyLayout,
    parameter_shapes,
    recognise_layout,
)
from virnuc_core.models.positions import pair_rows
from virnuc_core.models.tensor_files import read_tensors
from virnuc_core.specs import MODEL_IN_WORDS, Family, ModelSpec

# fair-esm builds every LayerNorm of ESM-2 with torch's default and does not record it.
_FAIR_ESM_LAYER_NORM_EPS: Final = 1e-5
_NAMED_AT_MOST: Final = 5
_MOST: Final = 1 << 31

# Our name of each architecture value -> its name in config.json and in the arguments of a fair-esm file.
_CONFIG_NAMES: Final = {
    "num_layers": "num_hidden_layers",
    "embedding_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "layer_norm_eps": "layer_norm_eps",
}
_FAIR_ESM_NAMES: Final = {
    "num_layers": "encoder_layers",
    "embedding_dim": "encoder_embed_dim",
    "num_heads": "encoder_attention_heads",
    "token_dropout": "token_dropout",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The files of one model.

    Attributes:
        name: what the user called it.
        family: architecture.
        location: path that `resolve_checkpoint` finds it by again, on this machine.
        files: weight files, in reading order.
        config: its config.json, where there is one.
        tokenizer: its tokenizer.json, where there is one.
        revision: commit of the hub repository it was fetched from.
        random_spec: for weights drawn at random, which are in no file: the architecture.
    """

    name: str
    family: Family
    location: Path
    files: tuple[Path, ...]
    config: Path | None = None
    tokenizer: Path | None = None
    revision: str | None = None
    random_spec: ModelSpec | None = None


@dataclass(frozen=True, slots=True)
class _Published:
    """What the files hold: tensors by normalised name, their layout, and fair-esm's arguments."""

    tensors: Mapping[str, Tensor]
    layout: KeyLayout
    arguments: Mapping[str, Any] | None


def recognise_family(files: tuple[Path, ...]) -> Family:
    """The architecture whose tensors these files hold.

    Raises:
        CheckpointError: a file is damaged, or they hold neither.
    """
    return _read_published(files).layout.family


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The architecture, from the shapes of the tensors and from what the checkpoint says of itself.

    Raises:
        CheckpointError: a file is damaged, something is not said, or two of them contradict each other.
    """
    if checkpoint.random_spec is not None:
        return checkpoint.random_spec
    return _spec_of(checkpoint, _read_published(checkpoint.files))


def load_state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All weights under our parameter names, on the CPU, in the dtype of the file.

    The query and key rows of ESM-2 come in the order of `pair_rows`.

    Raises:
        CheckpointError: a file is damaged, or tensors are missing, unknown, or of another shape.
    """
    spec, published = load_published(checkpoint)
    state = {name: _fused(name, parts) for name, parts in published.items()}
    if spec.family == "esm2":
        paired = {n: pair_rows(rows, spec.num_heads) for n, rows in state.items() if ".qkv." in n}
        state.update(paired)
    return state


def load_published(checkpoint: Checkpoint) -> tuple[ModelSpec, dict[str, tuple[Tensor, ...]]]:
    """The architecture, and the tensors of the files that make up each of our parameters, as they are there.

    Raises:
        CheckpointError: a file is damaged, or tensors are missing, unknown, or of another shape.
    """
    published = _read_published(checkpoint.files)
    layout, tensors = published.layout, published.tensors
    spec = _spec_of(checkpoint, published)
    shapes = parameter_shapes(spec)
    sources = {name: layout.sources(name) for name in shapes}
    wanted = {source: name for name, parts in sources.items() for source in parts}
    _refuse(checkpoint, "lacks", [source for source in wanted if source not in tensors])
    unknown = [key for key in tensors if key not in wanted and not layout.is_dropped(key)]
    _refuse(checkpoint, "has unknown", unknown)
    misshapen = [
        f"{source} of {tensors[source].dtype}" for source in wanted if not tensors[source].is_floating_point()
    ]
    for source, name in wanted.items():
        found = tuple(tensors[source].shape)
        shape = (shapes[name][0] // len(sources[name]), *shapes[name][1:])
        if (found[1:] if name == TOKEN_TYPE and found[:1] > (0,) else found) != shape:
            misshapen.append(f"{source} {found} where {shape} belongs")
    _refuse(checkpoint, "has misshapen", misshapen)
    return spec, {name: tuple(tensors[source] for source in parts) for name, parts in sources.items()}


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 (hex) over the weight files and the tokenizer, which decide every vector."""
    total = hashlib.sha256(repr(checkpoint.random_spec).encode() if checkpoint.random_spec else b"")
    for path in (*checkpoint.files, *([checkpoint.tokenizer] if checkpoint.tokenizer else [])):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def tokenizer_path(checkpoint: Checkpoint) -> Path:
    """The tokenizer.json that belongs to a DNABERT-S checkpoint.

    Raises:
        CheckpointError: it is not beside the weights.
    """
    if checkpoint.tokenizer is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} has no tokenizer.json beside {checkpoint.files[0]}. "
            "Put the model's own tokenizer.json there."
        )
    return checkpoint.tokenizer


def _fused(name: str, parts: tuple[Tensor, ...]) -> Tensor:
    """One parameter; of the table of token types its first row."""
    if name == TOKEN_TYPE:
        return parts[0][0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_published(files: tuple[Path, ...]) -> _Published:
    tensors: dict[str, Tensor] = {}
    arguments = None
    for path in files:
        more, found = read_tensors(path)
        tensors |= more
        arguments = arguments or found
    layout = recognise_layout(tensors)
    if layout is None:
        raise CheckpointError(
            f"{files[0]} holds neither ESM-2 nor DNABERT-S weights (first tensors: "
            f"{', '.join(sorted(tensors)[:_NAMED_AT_MOST]) or 'none'}). Give the checkpoint of one of them."
        )
    return _Published({layout.normalise(key): value for key, value in tensors.items()}, layout, arguments)


def _spec_of(checkpoint: Checkpoint, published: _Published) -> ModelSpec:
    measured = _measured(checkpoint, published)
    declared = _declared(checkpoint, published)
    for name, value in measured.items():
        if declared.get(name, value) != value:
            raise CheckpointError(
                f"checkpoint {checkpoint.name} contradicts itself: {name} is {declared[name]} in its "
                f"configuration and {value} in its weights. Fetch both from the same place."
            )
    merged = measured | declared
    if "num_heads" not in merged:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} does not say how many heads it has. "
            "Give the whole published file instead of its state dict."
        )
    spec = ModelSpec(
        family=checkpoint.family,
        num_layers=int(merged["num_layers"]),
        embedding_dim=int(merged["embedding_dim"]),
        num_heads=int(merged["num_heads"]),
        ffn_dim=int(merged["ffn_dim"]),
        vocab_size=int(merged["vocab_size"]),
        layer_norm_eps=float(merged["layer_norm_eps"]),
        token_dropout=bool(merged.get("token_dropout", False)),
    )
    _check_spec(checkpoint, spec)
    return spec


def _measured(checkpoint: Checkpoint, published: _Published) -> dict[str, float]:
    """What the shapes of the tensors say."""
    layout, tensors = published.layout, published.tensors
    embedding, ffn = (
        ("embed_tokens.weight", "layers.0.ffn_in.weight")
        if layout.family == "esm2"
        else ("word_embeddings.weight", "layers.0.ffn_out.weight")
    )
    names = [layout.sources(name)[0] for name in (embedding, ffn)]
    _refuse(checkpoint, "lacks", [name for name in names if name not in tensors])
    flat = [f"{name} {tuple(tensors[name].shape)}" for name in names if tensors[name].ndim != 2]
    _refuse(checkpoint, "has misshapen", flat)
    vocab_size, embedding_dim = tensors[names[0]].shape
    num_layers = layout.num_layers(tensors)
    # More layers than tensors: before all their names are made, one by one.
    _refuse(checkpoint, "lacks", [layout.layer.format(n=n) for n in range(min(num_layers - len(tensors), 1))])
    measured: dict[str, float] = {
        "num_layers": num_layers,
        "embedding_dim": embedding_dim,
        "ffn_dim": tensors[names[1]].shape[0 if layout.family == "esm2" else 1],
        "vocab_size": vocab_size,
    }
    # The frequencies of rotary positions, kept by fair-esm, are half a head wide.
    if (rotary := tensors.get("layers.0.self_attn.rot_emb.inv_freq")) is not None and rotary.numel():
        measured["num_heads"] = embedding_dim // (2 * rotary.numel())
    return measured


def _declared(checkpoint: Checkpoint, published: _Published) -> dict[str, Any]:
    """What config.json or the arguments of a fair-esm file say."""
    if published.layout is FAIR_ESM:
        fixed = {"layer_norm_eps": _FAIR_ESM_LAYER_NORM_EPS}
        if published.arguments is None:
            return fixed | {"token_dropout": True}
        return fixed | _renamed(checkpoint, "its arguments", published.arguments, _FAIR_ESM_NAMES)
    if checkpoint.config is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} has no config.json beside {checkpoint.files[0]}. "
            "Put the model's own config.json there: the number of heads is nowhere else."
        )
    try:
        config = parse_object(checkpoint.config.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.config} cannot be read ({error}). Put the model's own config.json there."
        ) from error
    declared = _renamed(checkpoint, str(checkpoint.config), config, _CONFIG_NAMES)
    if published.layout.family == "esm2":
        if config.get("position_embedding_type") != "rotary" or config.get("emb_layer_norm_before"):
            raise CheckpointError(
                f"{checkpoint.config} describes another model than ESM-2 (its positions are not rotary, or "
                "it normalises its embeddings). Give an ESM-2 checkpoint; ESM-1b and ESM-1v are not."
            )
        declared["token_dropout"] = config.get("token_dropout", False)
    return declared


def _renamed(
    checkpoint: Checkpoint, where: str, values: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    if absent := [theirs for ours, theirs in names.items() if not _can_be(ours, values.get(theirs))]:
        raise CheckpointError(
            f"checkpoint {checkpoint.name}: {where} has no number for {', '.join(absent)}. "
            "Fetch the configuration again from where the weights are from."
        )
    return {ours: values[theirs] for ours, theirs in names.items()}


def _can_be(name: str, value: object) -> bool:
    """Whether a value of a configuration may stand for one of ours."""
    if name == "token_dropout":
        return isinstance(value, bool | int)
    if name == "layer_norm_eps":
        return isinstance(value, int | float) and 0 < value < 1
    return type(value) is int and 0 < value < _MOST


def _check_spec(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    if not all((spec.num_layers, spec.embedding_dim, spec.ffn_dim, spec.vocab_size)):
        problem = "some of its tensors have no elements"
    elif spec.num_heads < 1 or spec.embedding_dim % spec.num_heads:
        problem = f"width {spec.embedding_dim} is not a multiple of {spec.num_heads} heads"
    elif spec.family == "esm2" and spec.head_dim % 2:
        problem = f"rotary positions need heads of even width, not {spec.head_dim}"
    elif spec.family == "esm2" and spec.vocab_size < Esm2Tokenizer.vocab_size:
        problem = f"its vocabulary of {spec.vocab_size} is smaller than the ESM-2 alphabet"
    elif (path := checkpoint.tokenizer) and (size := DnabertTokenizer(path).vocab_size) > spec.vocab_size:
        problem = f"its tokenizer has {size} entries and its embedding {spec.vocab_size}"
    else:
        return
    raise CheckpointError(
        f"checkpoint {checkpoint.name} is not {MODEL_IN_WORDS[spec.family]}: {problem}. "
        "Give another checkpoint."
    )


def _refuse(checkpoint: Checkpoint, verb: str, names: list[str]) -> None:
    """Raises when there are any names to complain of."""
    if names:
        more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
        raise CheckpointError(
            f"checkpoint {checkpoint.name} {verb} tensors: {', '.join(names[:_NAMED_AT_MOST])}{more}. "
            f"It is not the whole of {MODEL_IN_WORDS[checkpoint.family]}: fetch it again, or give another one."
        )
