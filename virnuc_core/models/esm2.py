"""ESM-2 on packed tokens: a pre-LayerNorm encoder with rotary positions.

Shapes: B sequences, T tokens (BOS and EOS included), N heads, H head dim, D embedding_dim, F ffn_dim.

    input_ids (T,) -> embed, token dropout (T, D) -> layers -> final LayerNorm (T, D)
    layer: x + attention(norm(x)), then x + ffn(norm(x)), ffn = Linear(F -> D)(gelu(Linear(D -> F)))

Source: fair-esm 2.0.0, esm/model/esm2.py and esm/modules.py.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.nn import functional

from virnuc_core.models.attention import AttentionBackend, PackedLayout, packed_attention
from virnuc_core.models.encoder import Encoder, validate_repr_layer
from virnuc_core.models.linear import linear, linear_gelu, linear_residual
from virnuc_core.specs import ModelSpec

MASK_TOKEN = 32
_TRAINED_MASK_RATIO = 0.15 * 0.8


class ESM2Layer(nn.Module):
    """One transformer layer; `qkv` holds the rows of queries, keys and values one after another."""

    def __init__(self, spec: ModelSpec, dropout: float) -> None:
        super().__init__()
        width = spec.embedding_dim
        self.num_heads = spec.num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.ffn_in = nn.Linear(width, spec.ffn_dim)
        self.ffn_out = nn.Linear(spec.ffn_dim, width)

    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        """(T, D) -> (T, D)."""
        dropout = self.dropout if self.training else 0.0
        qkv = linear(self.qkv, self.attention_norm(hidden_states)).unflatten(1, (3, self.num_heads, -1))
        attended = packed_attention(qkv, layout)
        hidden_states = linear_residual(self.attention_out, attended, hidden_states, dropout)
        inner = linear_gelu(self.ffn_in, self.ffn_norm(hidden_states))
        return linear_residual(self.ffn_out, inner, hidden_states, dropout)


class ESM2(Encoder):
    """The protein language model.

    Layer 0 is the scaled embedding, and the last layer is taken after the final LayerNorm.

    Args:
        spec: the architecture, family "esm2".
        dropout: share of each residual branch dropped in training mode; inference ignores it.
    """

    pools_specials: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__(spec)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.embedding_dim)
        self.layers = nn.ModuleList(ESM2Layer(spec, dropout) for _ in range(spec.num_layers))
        self.final_norm = nn.LayerNorm(spec.embedding_dim, eps=spec.layer_norm_eps)
        self.initialise_weights()

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
        for layer in self.layers[:last]:
            hidden_states = layer(hidden_states, layout)
        return self.final_norm(hidden_states) if last == self.spec.num_layers else hidden_states

    def _embed(self, input_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Token embeddings, (T, D), scaled as in training.

        Training hid 12 % of the tokens behind a zeroed <mask>, so the embeddings of a sequence are scaled
        to the share of it that is visible: by 0.88 when nothing is masked.
        """
        embedded: Tensor = self.embed_tokens(input_ids)
        if not self.spec.token_dropout:
            return embedded
        is_mask = input_ids == MASK_TOKEN
        bounds = layout.cu_seqlens.long()
        masked_before = functional.pad(is_mask.cumsum(0), (1, 0))[bounds]
        observed = masked_before.diff() / bounds.diff()
        scale = ((1 - _TRAINED_MASK_RATIO) / (1 - observed))[layout.sequence_index]
        return embedded * scale.masked_fill(is_mask, 0.0).to(embedded.dtype).unsqueeze(1)
