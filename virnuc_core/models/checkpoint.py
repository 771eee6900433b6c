"""Reading a model's checkpoint: opened once, recognised by its tensor names, validated, loaded.

A `KeyLayout` maps published tensor names to those of our parameters; "normalised" names lack the common prefix.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.files import file_digest, from_json, parse_object
from virnuc_core.models.attention import pair_rows
from virnuc_core.models.encoders import ESM2, DnabertS, Encoder
from virnuc_core.models.kernels import resolve_products
from virnuc_core.models.memory import upload
from virnuc_core.models.tensor_files import find_weight_files, is_finite, read_tensors
from virnuc_core.specs import MODEL_IN_WORDS, Family, ModelSpec, ProductBackend, ResolvedPrecision

# The one parameter that is a row of a published table instead of a whole tensor.
TOKEN_TYPE: Final = "token_type_embedding"  # noqa: S105

# Our name of each value of the architecture -> its name in config.json.
_CONFIG_NAMES: Final = {
    "vocab_size": "vocab_size",
    "embedding_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "layer_norm_eps": "layer_norm_eps",
}
_log = logging.getLogger(__name__)


def config_sizes(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of an architecture as config.json names them."""
    return {theirs: getattr(spec, ours) for ours, theirs in _CONFIG_NAMES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLayout:
    """One naming scheme of published checkpoints.

    Attributes:
        prefix: regular expression of what may precede every name, for instance `esm.`.
        layer: start of the names in a layer, with `{n}`.
        modules: our module -> the published one, outside of layers.
        layer_modules: our module -> published ones inside a layer; several are those of queries, keys and values.
        dropped: regular expression of names that are known and not needed.
    """

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

    def fits(self, keys: Iterable[str]) -> bool:
        """Whether published names include the attention of a first layer in this scheme."""
        first = self.layer.format(n=0)
        wanted = {f"{first}{source}.weight" for source in self.layer_modules["qkv"]}
        return wanted <= set(map(self.normalise, keys))

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


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The files of one model, and their tensors, memory-mapped.

    Attributes:
        name: as the user gave it.
        location: path or `random:NAME`, with which `hub.open_checkpoint` finds it again on this machine.
        files: weight files, in reading order; none with random weights.
        random_spec: the architecture, with random weights only.
        layout: naming scheme of the tensors, which go by normalised names; None with random weights.
    """

    name: str
    family: Family
    location: Path
    files: tuple[Path, ...] = ()
    tokenizer_file: Path | None = None
    random_spec: ModelSpec | None = None
    layout: KeyLayout | None = field(default=None, repr=False)
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path, family: Family | None = None, *, name: str | None = None) -> Self:
        """Opens a weight file, or the weights in a folder; `family` is the required architecture, None accepts both.

        Raises:
            CheckpointError: there are no weights, a file is damaged, or it holds another model.
        """
        folder = path if path.is_dir() else path.parent
        files = find_weight_files(path) if path.is_dir() else (path,)
        if not files:
            raise CheckpointError(
                f"{path} contains no model.safetensors or pytorch_model.bin, complete or in shards. Give the folder with the "
                "weights, or the weight file."
            )
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= read_tensors(file)
        layout = next((one for one in (FAIR_ESM, TRANSFORMERS_ESM, DNABERT) if one.fits(tensors)), None)
        if layout is None:
            raise CheckpointError(
                f"{files[0]} contains neither ESM-2 nor DNABERT-S weights (first tensors: "
                f"{', '.join(sorted(tensors)[:5]) or 'none'}). Give a checkpoint of either."
            )
        if family not in (None, layout.family):
            raise CheckpointError(
                f"{path} contains {MODEL_IN_WORDS[layout.family]}, but {MODEL_IN_WORDS[family]} is needed. Give a checkpoint "
                f"of {MODEL_IN_WORDS[family]}."
            )
        tokenizer = folder / "tokenizer.json"
        return cls(
            name=name or path.name,
            family=layout.family,
            location=path,
            files=files,
            tokenizer_file=tokenizer if layout.family == "dnabert_s" and tokenizer.is_file() else None,
            layout=layout,
            tensors={layout.normalise(key): value for key, value in tensors.items()},
        )

    @cached_property
    def spec(self) -> ModelSpec:
        """The architecture, from the shapes of the tensors and the configuration."""
        if self.random_spec is not None:
            return self.random_spec
        measured, declared = self._measured(), self._declared()
        for name, value in measured.items():
            if declared.get(name, value) != value:
                raise CheckpointError(
                    f"checkpoint {self.name} is inconsistent: {name} is {declared[name]} in its configuration but {value} in "
                    "its weights. Download both from the same source."
                )
        try:
            spec = from_json(ModelSpec, {"family": self.family, **measured, **declared})
            self._require_possible(spec)
        except ValueError as error:
            raise CheckpointError(
                f"checkpoint {self.name} is not {MODEL_IN_WORDS[self.family]}: {error}. Give another one, or the complete "
                "published file with its configuration."
            ) from error
        return spec

    @cached_property
    def tokenizer(self) -> DnabertTokenizer:
        """The tokenizer of a DNABERT-S model."""
        if self.tokenizer_file is None:
            raise CheckpointError(
                f"checkpoint {self.name} has no tokenizer.json next to {self.files[0]}. "
                "Put the model's tokenizer.json there."
            )
        return DnabertTokenizer(self.tokenizer_file)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over those of the weight files and the tokenizer, which determine every vector."""
        total = hashlib.sha256(repr(self.random_spec).encode() if self.random_spec else b"")
        for path in (*self.files, *([self.tokenizer_file] if self.tokenizer_file else [])):
            total.update(bytes.fromhex(_sha256(path)))
        return total.hexdigest()

    def published_parts(self) -> dict[str, tuple[Tensor, ...]]:
        """The file's tensors that make up each of our parameters, unchanged."""
        assert self.layout is not None  # it has files
        layout, tensors = self.layout, self.tensors
        shapes = parameter_shapes(self.spec)
        sources = {name: layout.sources(name) for name in shapes}
        wanted = {source: name for name, parts in sources.items() for source in parts}
        self._refuse("lacks", [source for source in wanted if source not in tensors])
        unknown = [key for key in tensors if key not in wanted and not re.fullmatch(layout.dropped, key)]
        self._refuse("has unknown", unknown)
        misshapen = []
        for source, name in wanted.items():
            found = tuple(tensors[source].shape)
            shape = (shapes[name][0] // len(sources[name]), *shapes[name][1:])
            if not tensors[source].is_floating_point():
                misshapen.append(f"{source} of {tensors[source].dtype}")
            elif (found[1:] if name == TOKEN_TYPE and found[:1] > (0,) else found) != shape:
                misshapen.append(f"{source} {found} where {shape} belongs")
        self._refuse("has misshapen", misshapen)
        return {name: tuple(tensors[source] for source in parts) for name, parts in sources.items()}

    def assemble(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """One of our parameters from its `published_parts`, in their dtype and on their device."""
        if name == TOKEN_TYPE:
            return parts[0][0]
        if len(parts) == 1:
            return parts[0]
        queries, keys, values = parts
        return pair_rows(queries, keys, values, self.spec.num_heads)

    def _measured(self) -> dict[str, int]:
        """Values derived from the shapes of the tensors."""
        assert self.layout is not None  # it has files
        embedding = "embed_tokens.weight" if self.family == "esm2" else "word_embeddings.weight"
        names = [self.layout.sources(name)[0] for name in (embedding, "layers.0.ffn_out.weight")]
        self._refuse("lacks", [name for name in names if name not in self.tensors])
        shapes = [tuple(self.tensors[name].shape) for name in names]
        flat = [f"{name} {shape}" for name, shape in zip(names, shapes, strict=True) if len(shape) != 2]
        self._refuse("has misshapen", flat)
        vocab_size, embedding_dim = shapes[0]
        layer = re.compile(re.escape(self.layout.layer).replace(r"\{n\}", "([0-9]{1,9})"))
        last = max(int(match[1]) for key in self.tensors if (match := layer.match(key)))
        measured = {
            # More layers than tensors would take long to report, name by name.
            "num_layers": min(last + 1, len(self.tensors)),
            "embedding_dim": embedding_dim,
            "ffn_dim": shapes[1][1],
            "vocab_size": vocab_size,
        }
        # fair-esm stores the rotary frequencies, which are half a head wide.
        rotary = self.tensors.get("layers.0.self_attn.rot_emb.inv_freq")
        if rotary is not None and rotary.numel():
            measured["num_heads"] = embedding_dim // (2 * rotary.numel())
        return measured

    def _declared(self) -> dict[str, Any]:
        """Values from config.json, or those of every ESM-2 of fair-esm."""
        if self.layout is FAIR_ESM:
            return {"layer_norm_eps": 1e-5, "token_dropout": True}
        path = self.files[0].parent / "config.json"
        try:
            config = parse_object(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}). Put the model's config.json there: only it states the number of heads."
            ) from error
        declared = {ours: config.get(theirs) for ours, theirs in _CONFIG_NAMES.items()}
        if self.family == "esm2":
            if config.get("position_embedding_type") != "rotary" or config.get("emb_layer_norm_before"):
                raise CheckpointError(
                    f"{path} does not describe an ESM-2 model (positions are not rotary, or embeddings are normalized). Give "
                    "an ESM-2 checkpoint; ESM-1b and ESM-1v are not supported."
                )
            declared["token_dropout"] = config.get("token_dropout", False)
        return declared

    def _require_possible(self, spec: ModelSpec) -> None:
        """Raises ValueError for sizes that go together in no model."""
        if spec.embedding_dim % spec.num_heads:
            raise ValueError(f"width {spec.embedding_dim} is not a multiple of {spec.num_heads} heads")
        if spec.family == "esm2" and spec.head_dim % 2:
            raise ValueError(f"rotary positions need heads of even width, not {spec.head_dim}")
        if spec.family == "esm2" and spec.vocab_size < Esm2Tokenizer.vocab_size:
            raise ValueError(f"its vocabulary of {spec.vocab_size} is smaller than the ESM-2 alphabet")
        if self.tokenizer_file is not None and (size := self.tokenizer.vocab_size) > spec.vocab_size:
            raise ValueError(f"its tokenizer has {size} entries and its embedding {spec.vocab_size}")

    def _refuse(self, verb: str, names: list[str]) -> None:
        """Raises CheckpointError if any tensors are named."""
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(
                f"checkpoint {self.name} {verb} tensors: {', '.join(names[:5])}{more}. "
                f"It is not a complete checkpoint of {MODEL_IN_WORDS[self.family]}: download it again, or give another one."
            )


def _sha256(path: Path) -> str:
    """SHA-256 (hex) of a file. Large files in the hub's cache are named by it; others are read once per process."""
    path = path.resolve()
    if path.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", path.name):
        return path.name
    status = path.stat()
    return _read_sha256(path, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(maxsize=64)
def _read_sha256(path: Path, state: tuple[int, ...]) -> str:
    return file_digest(path)


def random_state_dict(spec: ModelSpec, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters of a model, drawn on `device` in fp32 and cast; the same numbers on every device of a kind.

    They are spread like trained ones (LayerNorm gains near 1, the rest normal), since the speed of a GPU at its power
    limit depends on them.
    """
    generator = torch.Generator(device).manual_seed(0)
    state = {}
    for name, shape in parameter_shapes(spec).items():
        values = torch.empty(shape, device=device).normal_(std=0.02, generator=generator)
        state[name] = (values + 1 if name.endswith("norm.weight") else values).to(dtype)
    return state


class _Undrawn(TorchFunctionMode):
    """Draws no initial weights: for those that have no storage, torch would import its compiler, which takes seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **(kwargs or {}))


def _without_storage(spec: ModelSpec) -> Encoder:
    with torch.device("meta"), _Undrawn():
        return ESM2(spec) if spec.family == "esm2" else DnabertS(spec)


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a model."""
    return {name: tuple(values.shape) for name, values in _without_storage(spec).named_parameters()}


def read_weights(checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters of a model on a device, which they reach one at a time, as they are in the file, to be cast there."""
    state = {}
    for name, parts in checkpoint.published_parts().items():
        state[name] = checkpoint.assemble(name, [upload(part, device).to(dtype) for part in parts])
        # The cast may overflow where the file's values are finite.
        if not is_finite(state[name]) and not is_finite(checkpoint.assemble(name, parts)):
            raise CheckpointError(
                f"checkpoint {checkpoint.name} is corrupt: {name} contains non-finite values. Download it again."
            )
    return state


@torch.no_grad()
def load_model(
    checkpoint: Checkpoint,
    device: torch.device | str,
    precision: ResolvedPrecision,
    *,
    products: ProductBackend | None = None,
    compiled: bool = False,
) -> Encoder:
    """A model in evaluation mode without gradients.

    `products` are those of the device by default; fp8 needs those of QuACK. `compiled` compiles the layers with torch.compile,
    which takes those of torch.

    Raises:
        UsageError: the device or the model's widths are not for fp8.
    """
    device, spec = torch.device(device), checkpoint.spec
    if products is None:
        products = "torch" if compiled else resolve_products(device, precision, spec)
    if precision == "fp8" and products == "torch":
        raise UsageError(
            f"fp8 needs QuACK on a Hopper GPU, not {device}, and model widths that are multiples of 16, not "
            f"{spec.embedding_dim} and {spec.ffn_dim}: use --precision bf16"
        )
    model = _without_storage(spec)
    # In fp8, of everything but the matrix products.
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    is_random = checkpoint.random_spec is not None
    state = random_state_dict(spec, device, dtype) if is_random else read_weights(checkpoint, device, dtype)
    model.load_state_dict(state, assign=True)
    del state  # weights are replaced one after another
    model = model.requires_grad_(False).eval()
    if products == "quack":
        model.fuse(torch.float8_e4m3fn if precision == "fp8" else dtype)
    elif not compiled or device.type != "cpu":
        model.prepare_inference()  # graphs cannot take weights packed by oneDNN
    if compiled:
        model.compile_layers()
    _log.info("loaded %s in %s on %s", checkpoint.name, precision, device)
    return model
