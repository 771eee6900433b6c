"""ESM-2 on packed tokens: a pre-LayerNorm encoder with rotary positions.

Shapes: B sequences, T tokens (BOS and EOS included), N heads, H head dim, D embedding_dim, F ffn_dim.

    input_ids (T,) -> embed, token dropout (T, D) -> layers -> final LayerNorm (T, D)
    layer: x + attention(norm(x)), then x + ffn(norm(x)), ffn = Linear(F -> D)(gelu(Linear(D -> F)))

Source: fair-esm 2.0.0, esm/model/esm2.py and esm/modules.py.
"""

from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.models.attention import PackedLayout, packed_attention
from virnuc_core.models.encoder import Encoder, validate_repr_layer
from virnuc_core.models.fused import (
    Fp8Linear,
    GemmInput,
    Linear,
    has_half_kernels,
    layer_norm,
    linear,
    linear_add_norm,
    linear_gelu,
    quantize_attention,
    quantize_feed_forward,
)
from virnuc_core.models.positions import sequence_index
from virnuc_core.specs import AttentionBackend, ModelSpec

MASK_TOKEN = 32
_TRAINED_MASK_RATIO = 0.15 * 0.8


class ESM2Layer(nn.Module):
    """A transformer layer up to the next layer's LayerNorm; the rows of `qkv` are in the order of `pair_rows`."""

    def __init__(self, spec: ModelSpec, dropout: float) -> None:
        super().__init__()
        width = spec.embedding_dim
        self.num_heads = spec.num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.qkv: Linear = nn.Linear(width, 3 * width)
        self.attention_out: Linear = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.ffn_in: Linear = nn.Linear(width, spec.ffn_dim)
        self.ffn_out: Linear = nn.Linear(spec.ffn_dim, width)

    def quantize(self) -> None:
        """See `Encoder.quantize`."""
        self.qkv, self.attention_out = quantize_attention(self.attention_norm, self.qkv, self.attention_out)
        self.ffn_in, self.ffn_out = quantize_feed_forward(
            self.ffn_norm, self.ffn_in, self.ffn_out, gated=False
        )

    def forward(
        self,
        hidden_states: Tensor,
        normed: GemmInput,
        next_norm: nn.LayerNorm,
        is_last: bool,
        layout: PackedLayout,
    ) -> tuple[Tensor, GemmInput]:
        """Hidden states (T, D), normed by `attention_norm` -> hidden states (T, D), normed by `next_norm`."""
        dropout = self.dropout if self.training else 0.0
        qkv = linear(self.qkv, normed).unflatten(1, (3, self.num_heads, -1))
        attended = packed_attention(qkv, layout, quantize=isinstance(self.attention_out, Fp8Linear))
        hidden_states, normed = linear_add_norm(
            self.attention_out, attended, hidden_states, self.ffn_norm, self.ffn_in, dropout=dropout
        )
        inner = linear_gelu(self.ffn_in, normed, self.ffn_out)
        next_linear = None if is_last else self.qkv
        return linear_add_norm(self.ffn_out, inner, hidden_states, next_norm, next_linear, dropout=dropout)


class ESM2(Encoder):
    """The protein language model; layer 0 is the scaled embedding, the last is taken after the final LayerNorm."""

    pools_special_tokens: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__(spec)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.embedding_dim)
        self.layers = nn.ModuleList(ESM2Layer(spec, dropout) for _ in range(spec.num_layers))
        self.final_norm = nn.LayerNorm(spec.embedding_dim, eps=spec.layer_norm_eps)
        self.initialise_weights()

    def quantize(self) -> None:
        """See `Encoder.quantize`."""
        for layer in cast(list[ESM2Layer], list(self.layers)):
            layer.quantize()

    def build_layout(self, cu_seqlens: npt.NDArray[np.int32], backend: AttentionBackend) -> PackedLayout:
        """See `Encoder.build_layout`."""
        weight = self.embed_tokens.weight
        return PackedLayout.build(
            cu_seqlens,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
            rotary_head_dim=self.spec.head_dim,
        )

    def forward(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        """See `Encoder.forward`."""
        last = validate_repr_layer(self.spec, repr_layer)
        hidden_states = self._embed(input_ids, layout)
        if last == 0:
            return hidden_states
        layers = cast(list[ESM2Layer], list(self.layers))
        next_norms = [layer.attention_norm for layer in layers[1:]] + [self.final_norm]
        _, normed = layer_norm(layers[0].attention_norm, hidden_states, layers[0].qkv)
        for layer, next_norm in zip(layers[:last], next_norms, strict=False):
            is_last = next_norm is self.final_norm
            hidden_states, normed = layer(hidden_states, normed, next_norm, is_last, layout)
        return cast(Tensor, normed) if last == self.spec.num_layers else hidden_states

    def _embed(self, input_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Token embeddings (T, D), times 0.88 / (unmasked share of the sequence): training masked 12 % of tokens."""
        if self.spec.token_dropout and has_half_kernels(self.embed_tokens.weight):
            scaled: Tensor = torch.ops.virnuc.embed_tokens(
                input_ids, layout.cu_seqlens, self.embed_tokens.weight, MASK_TOKEN, 1 - _TRAINED_MASK_RATIO
            )
            return scaled
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
