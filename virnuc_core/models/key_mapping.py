"""Whose names the tensors of a checkpoint carry, and which of them make up each of our parameters."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from virnuc_core.specs import Family, ModelSpec

# The one parameter that is a row of a published table instead of a whole tensor.
TOKEN_TYPE: Final = "token_type_embedding"  # noqa: S105


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLayout:
    """One naming scheme of published checkpoints.

    Attributes:
        name: for messages.
        family: architecture that it describes.
        prefix: regular expression of what may precede every name, for instance `esm.`.
        layer: begin of the names of a layer, with `{n}`.
        modules: our module -> the published one, outside of layers.
        layer_modules: our module -> published ones, inside a layer; several are fused by rows.
        dropped: regular expression of names that are known and not needed.
    """

    name: str
    family: Family
    prefix: str
    layer: str
    modules: Mapping[str, str]
    layer_modules: Mapping[str, tuple[str, ...]]
    dropped: str

    def normalise(self, key: str) -> str:
        """A published name without its prefix; `gamma` and `beta` become `weight` and `bias`."""
        key = re.sub(rf"^(?:{self.prefix})", "", key)
        return re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", key))

    def is_dropped(self, key: str) -> bool:
        """Whether a normalised name is known and not needed."""
        return re.fullmatch(self.dropped, key) is not None

    def fits(self, keys: Iterable[str]) -> bool:
        """Whether normalised names include the attention of a first layer in this scheme."""
        first = self.layer.format(n=0)
        wanted = {f"{first}{source}.weight" for source in self.layer_modules["qkv"]}
        return wanted <= set(keys)

    def num_layers(self, keys: Iterable[str]) -> int:
        """Layers that normalised names mention."""
        pattern = re.compile(re.escape(self.layer).replace(r"\{n\}", "([0-9]{1,9})"))
        return 1 + max((int(m[1]) for key in keys if (m := pattern.match(key))), default=-1)

    def sources(self, parameter: str) -> tuple[str, ...]:
        """The normalised published tensors that make up one of our parameters, in row order."""
        if parameter == TOKEN_TYPE:
            return (f"{self.modules[TOKEN_TYPE]}.weight",)
        module, _, leaf = parameter.rpartition(".")
        if not module.startswith("layers."):
            return (f"{self.modules[module]}.{leaf}",)
        _, n, inner = module.split(".")
        return tuple(f"{self.layer.format(n=n)}{source}.{leaf}" for source in self.layer_modules[inner])


FAIR_ESM: Final = KeyLayout(
    name="fair-esm",
    family="esm2",
    prefix=r"encoder\.sentence_encoder\.|encoder\.",
    layer="layers.{n}.",
    modules={"embed_tokens": "embed_tokens", "final_norm": "emb_layer_norm_after"},
    layer_modules={
        "attention_norm": ("self_attn_layer_norm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention_out": ("self_attn.out_proj",),
        "ffn_norm": ("final_layer_norm",),
        "ffn_in": ("fc1",),
        "ffn_out": ("fc2",),
    },
    dropped=r"(lm_head|contact_head)\..*|layers\.\d+\.self_attn\.rot_emb\.inv_freq",
)

# Published ESM-2 files carry an absolute position table that the rotary model never reads.
TRANSFORMERS_ESM: Final = KeyLayout(
    name="transformers EsmModel",
    family="esm2",
    prefix=r"esm\.",
    layer="encoder.layer.{n}.",
    modules={"embed_tokens": "embeddings.word_embeddings", "final_norm": "encoder.emb_layer_norm_after"},
    layer_modules={
        "attention_norm": ("attention.LayerNorm",),
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention_out": ("attention.output.dense",),
        "ffn_norm": ("LayerNorm",),
        "ffn_in": ("intermediate.dense",),
        "ffn_out": ("output.dense",),
    },
    dropped=(
        r"(lm_head|contact_head|pooler|classifier)\..*"
        r"|embeddings\.position_ids|embeddings\.position_embeddings\.weight|(.*\.)?rotary_embeddings\.inv_freq"
    ),
)

DNABERT: Final = KeyLayout(
    name="DNABERT-S",
    family="dnabert_s",
    prefix=r"bert\.",
    layer="encoder.layer.{n}.",
    modules={
        "word_embeddings": "embeddings.word_embeddings",
        TOKEN_TYPE: "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
    },
    layer_modules={
        "qkv": ("attention.self.Wqkv",),
        "attention_out": ("attention.output.dense",),
        "attention_norm": ("attention.output.LayerNorm",),
        "ffn_in": ("mlp.gated_layers",),
        "ffn_out": ("mlp.wo",),
        "ffn_norm": ("mlp.layernorm",),
    },
    dropped=r"(cls|pooler|classifier)\..*|embeddings\.position_ids|encoder\.alibi",
)

LAYOUTS: Final = (FAIR_ESM, TRANSFORMERS_ESM, DNABERT)


def recognise_layout(keys: Iterable[str]) -> KeyLayout | None:
    """The scheme that the names of a checkpoint follow, or None."""
    names = list(keys)
    return next((layout for layout in LAYOUTS if layout.fits(map(layout.normalise, names))), None)


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the model that a spec describes."""
    width, ffn, vocab = spec.embedding_dim, spec.ffn_dim, spec.vocab_size
    layer: dict[str, tuple[int, ...]] = {
        **_norm("attention_norm", width),
        **_linear("qkv", width, 3 * width),
        **_linear("attention_out", width, width),
        **_norm("ffn_norm", width),
        **_linear("ffn_out", ffn, width),
    }
    if spec.family == "esm2":
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (vocab, width),
            **_norm("final_norm", width),
        }
        layer |= _linear("ffn_in", width, ffn)
    else:
        shapes = {
            "word_embeddings.weight": (vocab, width),
            TOKEN_TYPE: (width,),
            **_norm("embedding_norm", width),
        }
        layer |= {"ffn_in.weight": (2 * ffn, width)}
    layers = {f"layers.{n}.{name}": shape for n in range(spec.num_layers) for name, shape in layer.items()}
    return shapes | layers


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
