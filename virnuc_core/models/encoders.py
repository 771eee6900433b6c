"""The two transformers on packed tokens, and the interface that is all the engine knows of them.

Shapes: B sequences, T tokens (special ones included), N heads, H head dim, D embedding_dim, F ffn_dim.

    ESM-2       pre-LayerNorm, rotary positions. Source: fair-esm 2.0.0, esm/model/esm2.py and esm/modules.py.
        input_ids (T,) -> embed, token dropout (T, D) -> layers -> final LayerNorm (T, D)
        layer: x + attention(norm(x)), then x + ffn(norm(x)), ffn = Linear(F -> D)(gelu(Linear(D -> F)))
    DNABERT-S   post-LayerNorm, symmetric ALiBi, gated feed-forward. Source: its authors' bert_layers.py, also DNABERT-2's.
        input_ids (T,) -> LayerNorm(word + token type) (T, D) -> layers (T, D)
        layer: norm(x + attention(x)), then norm(x + ffn(x)), ffn = Linear(F -> D)(gelu(first half) * second half)
"""

from abc import abstractmethod
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.models.attention import PackedLayout, packed_attention, sequence_index
from virnuc_core.models.fused import FusedLayer, run_layers
from virnuc_core.models.kernels import has_kernels, keep_out_of_graphs
from virnuc_core.models.layers import (
    InterleavedGLU,
    Linear,
    SplitGLU,
    arrange_glu,
    has_half_kernels,
    layer_norm,
    linear,
    linear_add_norm,
    linear_gelu,
    pack_layers,
)
from virnuc_core.specs import AttentionBackend, ModelSpec

MASK_TOKEN = 32
_TRAINED_MASK_RATIO = 0.15 * 0.8


class Encoder(nn.Module):
    """A transformer over packed tokens."""

    layers: Any  # an nn.ModuleList, which has no type for its elements

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    def build_layout(self, cu_seqlens: npt.NDArray[np.int32], backend: AttentionBackend) -> PackedLayout:
        """The layout of one batch on the model's device; `cu_seqlens` is int32 (B + 1,) on the host, starting at 0."""
        weight = next(self.parameters())
        return PackedLayout.build(
            cu_seqlens,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
            head_dim=self.spec.head_dim,
            alibi_heads=self.spec.num_heads if self.spec.family == "dnabert_s" else None,
        )

    @abstractmethod
    def forward(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        """Hidden states of one packed batch, (T, D) in the model's dtype.

        `input_ids` is int32 or int64 (T,), special tokens included. `repr_layer` 0 is the embedding, n the output of
        layer n, None the last; later layers are not computed.
        """

    def embed(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        """Mean vectors of `forward`, fp32 (B, D) on the model's device; does not synchronise with the device."""
        hidden_states = self(input_ids, layout, repr_layer)
        is_dna = self.spec.family == "dnabert_s"
        return mean_pool(hidden_states, layout.cu_seqlens, include_special_tokens=is_dna)

    def prepare_inference(self) -> None:
        """Rearranges weights for the kernels of the device, once they are there in their final dtype."""
        pack_layers(self)

    @abstractmethod
    def input_norms(self) -> list[nn.LayerNorm]:
        """The LayerNorm before each layer's first product, and the one after the last layer."""

    def fuse(self, dtype: torch.dtype) -> None:
        """Replaces the layers by `FusedLayer`s with products in `dtype`, 16 bit or fp8 e4m3."""
        for index, norm in enumerate(self.input_norms()[:-1]):
            self.layers[index] = FusedLayer(self.layers[index], norm, dtype)

    @property
    def is_fused(self) -> bool:
        """Whether the layers are `FusedLayer`s."""
        return isinstance(self.layers[0], FusedLayer)

    def compile_layers(self) -> None:
        """Compiles the layers with torch.compile, for any number of tokens, when the first batch is computed.

        Our kernels and attention, which may loop over sequences, stay outside of the graphs.
        """
        # Otherwise sizes that happen to be equal in the first batch share a symbol, and others trigger recompilation.
        torch.fx.experimental._config.use_duck_shape = False
        keep_out_of_graphs()
        for layer in self.layers:
            layer.attend = torch.compiler.disable(packed_attention)
            layer.compile(dynamic=True)

    def initialise_weights(self) -> None:
        """Sets small normal weights and zero biases, for training from scratch."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class Layer(nn.Module):
    """A transformer layer; its modules are in the order in which they compute.

    The rows of ESM-2's `qkv` are in the order of `pair_rows`. DNABERT-S is gated and normalises sums (post-norm); its `ffn_in`
    has the rows of the gate's GELU half, then those of its linear half.
    """

    attend = staticmethod(packed_attention)

    def __init__(self, spec: ModelSpec, dropout: float) -> None:
        super().__init__()
        width, eps = spec.embedding_dim, spec.layer_norm_eps
        self.num_heads, self.dropout = spec.num_heads, dropout
        self.is_gated = gated = spec.family == "dnabert_s"
        if not gated:
            self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.qkv: Linear = nn.Linear(width, 3 * width)
        self.attention_out: Linear = nn.Linear(width, width)
        if gated:
            self.attention_norm = nn.LayerNorm(width, eps=eps)
        else:
            self.ffn_norm = nn.LayerNorm(width, eps=eps)
        self.ffn_in: Linear | InterleavedGLU | SplitGLU = nn.Linear(
            width, 2 * spec.ffn_dim if gated else spec.ffn_dim, bias=not gated
        )
        self.ffn_out: Linear = nn.Linear(spec.ffn_dim, width)
        if gated:
            self.ffn_norm = nn.LayerNorm(width, eps=eps)

    @property
    def middle_norm(self) -> nn.LayerNorm:
        """The LayerNorm between attention and feed-forward."""
        return self.attention_norm if self.is_gated else self.ffn_norm

    def forward(
        self, hidden_states: Tensor, normed: Tensor, next_norm: nn.LayerNorm, layout: PackedLayout
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and their LayerNorm, (T, D) -> both after this layer, normed by `next_norm`."""
        end_branch = partial(
            linear_add_norm, post_norm=self.is_gated, dropout=self.dropout if self.training else 0.0
        )
        qkv = linear(self.qkv, normed).unflatten(1, (3, self.num_heads, -1))
        attended = self.attend(qkv, layout)
        hidden_states, normed = end_branch(self.attention_out, attended, hidden_states, self.middle_norm)
        inner = linear_gelu(self.ffn_in, normed, gated=self.is_gated)
        return end_branch(self.ffn_out, inner, hidden_states, next_norm)


class ESM2(Encoder):
    """The protein language model; layer 0 is the scaled embedding, the last is taken after the final LayerNorm."""

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__(spec)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.embedding_dim)
        self.layers = nn.ModuleList(Layer(spec, dropout) for _ in range(spec.num_layers))
        self.final_norm = nn.LayerNorm(spec.embedding_dim, eps=spec.layer_norm_eps)
        self.initialise_weights()

    def input_norms(self) -> list[nn.LayerNorm]:
        return [layer.attention_norm for layer in self.layers] + [self.final_norm]

    def forward(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        last = self.spec.num_layers if repr_layer is None else repr_layer
        hidden_states = self._embed(input_ids, layout)
        if last == 0:
            return hidden_states
        if self.is_fused:
            hidden_states = run_layers(self.layers[:last], hidden_states, layout)
            return (
                layer_norm(self.final_norm, hidden_states) if last == self.spec.num_layers else hidden_states
            )
        first, *following = self.input_norms()
        normed = layer_norm(first, hidden_states)
        for layer, norm in zip(self.layers[:last], following, strict=False):
            hidden_states, normed = layer(hidden_states, normed, norm, layout)
        return normed if last == self.spec.num_layers else hidden_states

    def _embed(self, input_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Token embeddings (T, D), times 0.88 / (unmasked share of the sequence): training masked 12% of tokens."""
        if self.spec.token_dropout and has_half_kernels(self.embed_tokens.weight):
            from virnuc_core.models.kernels.rowwise import embed_tokens

            return embed_tokens(
                input_ids, layout.cu_seqlens, self.embed_tokens.weight, MASK_TOKEN, 1 - _TRAINED_MASK_RATIO
            )
        embedded: Tensor = self.embed_tokens(input_ids)
        if not self.spec.token_dropout:
            return embedded
        is_mask = input_ids == MASK_TOKEN
        sequences = sequence_index(layout.cu_seqlens, len(input_ids))
        bounds = layout.cu_seqlens.long()
        masked_before = functional.pad(is_mask.cumsum(0), (1, 0))[bounds]
        observed = masked_before.diff() / bounds.diff()
        scale = ((1 - _TRAINED_MASK_RATIO) / (1 - observed))[sequences]
        return embedded * scale.masked_fill(is_mask, 0.0).to(embedded.dtype).unsqueeze(1)


class DnabertS(Encoder):
    """The DNA language model; layer 0 is the embedding after its LayerNorm."""

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__(spec)
        self.word_embeddings = nn.Embedding(spec.vocab_size, spec.embedding_dim)
        self.token_type_embedding = nn.Parameter(torch.zeros(spec.embedding_dim))
        self.embedding_norm = nn.LayerNorm(spec.embedding_dim, eps=spec.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(spec, dropout) for _ in range(spec.num_layers))
        self.initialise_weights()

    def prepare_inference(self) -> None:
        for layer in self.layers:
            layer.ffn_in = arrange_glu(layer.ffn_in)
        super().prepare_inference()

    def input_norms(self) -> list[nn.LayerNorm]:
        return [self.embedding_norm, *(layer.ffn_norm for layer in self.layers)]

    def forward(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        last = self.spec.num_layers if repr_layer is None else repr_layer
        embedded = self.word_embeddings(input_ids) + self.token_type_embedding
        norms = self.input_norms()
        if self.is_fused:
            return layer_norm(norms[last], run_layers(self.layers[:last], embedded, layout))
        hidden_states = normed = layer_norm(norms[0], embedded)
        for layer in self.layers[:last]:
            hidden_states, normed = layer(hidden_states, normed, layer.ffn_norm, layout)
        return hidden_states


def mean_pool(hidden_states: Tensor, cu_seqlens: Tensor, *, include_special_tokens: bool) -> Tensor:
    """The mean hidden state of each sequence, fp32 (B, D), summed token by token in fp32, so independent of its batch.

    `hidden_states` is (T, D), `cu_seqlens` int32 (B + 1,) on its device. DNABERT-S includes the special tokens ([CLS]
    and [SEP]); ESM-2 leaves out the first and last token (BOS and EOS). A sequence with nothing to average gives
    zeros.
    """
    if has_kernels(hidden_states.device) and not torch.is_grad_enabled():
        from virnuc_core.models.kernels.rowwise import segment_mean

        return segment_mean(hidden_states, cu_seqlens, include_special_tokens)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if include_special_tokens:
        offsets = cu_seqlens.long()
        counts = ends - starts
        sums = torch.segment_reduce(hidden_states.float(), "sum", offsets=offsets, axis=0)
    else:
        # Three segments per sequence: first token, residues, last token. Bounds are clamped to the sequence, so that
        # one without residues has an empty middle.
        first_residue = torch.minimum(starts + 1, ends)
        last_residue = torch.maximum(ends - 1, first_residue)
        bounds = torch.stack((starts, first_residue, last_residue), dim=1).flatten()
        offsets = torch.cat((bounds, cu_seqlens[-1:].long()))
        counts = last_residue - first_residue
        sums = torch.segment_reduce(hidden_states.float(), "sum", offsets=offsets, axis=0)[1::3]
    return sums / counts.clamp(min=1).unsqueeze(1)
