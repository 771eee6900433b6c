"""DNABERT-S on packed tokens: a post-LayerNorm encoder with symmetric ALiBi and a gated feed-forward layer.

Shapes: B sequences, T tokens ([CLS] and [SEP] included), N heads, D embedding_dim, F ffn_dim.

    input_ids (T,) -> LayerNorm(word + token type) (T, D) -> layers (T, D)
    layer: norm(x + attention(x)), then norm(x + ffn(x)), ffn = Linear(F -> D)(gelu(first half) * second half)

Source: the DNABERT-S authors' bert_layers.py, which is also DNABERT-2's.
"""

from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from virnuc_core.models.attention import PackedLayout, packed_attention
from virnuc_core.models.encoder import Encoder, validate_repr_layer
from virnuc_core.models.fused import (
    Fp8Linear,
    GemmInput,
    InterleavedGLU,
    Linear,
    arrange_glu,
    layer_norm,
    linear,
    linear_add_norm,
    linear_gated_gelu,
    quantize_attention,
    quantize_feed_forward,
)
from virnuc_core.models.onednn import SplitGLU
from virnuc_core.specs import AttentionBackend, ModelSpec


class DnabertSLayer(nn.Module):
    """A transformer layer; `ffn_in` has the rows of the gate's GELU half, then those of its linear half."""

    def __init__(self, spec: ModelSpec, dropout: float) -> None:
        super().__init__()
        width = spec.embedding_dim
        self.num_heads = spec.num_heads
        self.dropout = dropout
        self.qkv: Linear = nn.Linear(width, 3 * width)
        self.attention_out: Linear = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.ffn_in: nn.Linear | Fp8Linear | InterleavedGLU | SplitGLU = nn.Linear(
            width, 2 * spec.ffn_dim, bias=False
        )
        self.ffn_out: Linear = nn.Linear(spec.ffn_dim, width)
        self.ffn_norm = nn.LayerNorm(width, eps=spec.layer_norm_eps)

    def quantize(self, input_norm: nn.LayerNorm) -> None:
        """See `Encoder.quantize`; `input_norm` is what the layer's input comes from."""
        self.qkv, self.attention_out = quantize_attention(input_norm, self.qkv, self.attention_out)
        self.ffn_in, self.ffn_out = quantize_feed_forward(
            self.attention_norm, self.ffn_in, self.ffn_out, gated=True
        )

    def forward(
        self, hidden_states: Tensor, gemm_input: GemmInput, layout: PackedLayout
    ) -> tuple[Tensor, GemmInput]:
        """Hidden states (T, D) and `gemm_input`, the same as the matrix products take it -> both after this layer."""
        dropout = self.dropout if self.training else 0.0
        qkv = linear(self.qkv, gemm_input).unflatten(1, (3, self.num_heads, -1))
        attended = packed_attention(qkv, layout, quantize=isinstance(self.attention_out, Fp8Linear))
        hidden_states, gemm_input = linear_add_norm(
            self.attention_out,
            attended,
            hidden_states,
            self.attention_norm,
            self.ffn_in,
            normed_residual=True,
            dropout=dropout,
        )
        inner = linear_gated_gelu(self.ffn_in, gemm_input, self.ffn_out)
        return linear_add_norm(
            self.ffn_out, inner, hidden_states, self.ffn_norm, self.qkv, normed_residual=True, dropout=dropout
        )


class DnabertS(Encoder):
    """The DNA language model; layer 0 is the embedding after its LayerNorm."""

    pools_special_tokens: ClassVar[bool] = True

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__(spec)
        self.word_embeddings = nn.Embedding(spec.vocab_size, spec.embedding_dim)
        self.token_type_embedding = nn.Parameter(torch.zeros(spec.embedding_dim))
        self.embedding_norm = nn.LayerNorm(spec.embedding_dim, eps=spec.layer_norm_eps)
        self.layers = nn.ModuleList(DnabertSLayer(spec, dropout) for _ in range(spec.num_layers))
        self.initialise_weights()

    def prepare_inference(self) -> None:
        """See `Encoder.prepare_inference`."""
        for layer in cast(list[DnabertSLayer], list(self.layers)):
            if isinstance(layer.ffn_in, nn.Linear):
                layer.ffn_in = arrange_glu(layer.ffn_in)

    def quantize(self) -> None:
        """See `Encoder.quantize`."""
        input_norm = self.embedding_norm
        for layer in cast(list[DnabertSLayer], list(self.layers)):
            layer.quantize(input_norm)
            input_norm = layer.ffn_norm

    def build_layout(self, cu_seqlens: npt.NDArray[np.int32], backend: AttentionBackend) -> PackedLayout:
        """See `Encoder.build_layout`."""
        weight = self.word_embeddings.weight
        return PackedLayout.build(
            cu_seqlens,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
            alibi_heads=self.spec.num_heads,
        )

    def forward(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        """See `Encoder.forward`."""
        last = validate_repr_layer(self.spec, repr_layer)
        embedded = self.word_embeddings(input_ids)
        layers = cast(list[DnabertSLayer], list(self.layers))
        hidden_states, gemm_input = layer_norm(
            self.embedding_norm, embedded, layers[0].qkv, self.token_type_embedding
        )
        for layer in layers[:last]:
            hidden_states, gemm_input = layer(hidden_states, gemm_input, layout)
        return hidden_states
