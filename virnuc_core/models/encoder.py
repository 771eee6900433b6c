"""The interface of the two transformers: all that the engine needs to know of them."""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from virnuc_core.errors import UsageError
from virnuc_core.models.attention import PackedLayout
from virnuc_core.models.kernels import has_kernels
from virnuc_core.specs import AttentionBackend, ModelSpec

_INITIAL_STD = 0.02


class Encoder(nn.Module):
    """A transformer over packed tokens; `pools_special_tokens` says whether means include first and last tokens."""

    pools_special_tokens: ClassVar[bool]
    layers: nn.ModuleList

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    @abstractmethod
    def build_layout(self, cu_seqlens: npt.NDArray[np.int32], backend: AttentionBackend) -> PackedLayout:
        """The layout of one batch on the model's device; `cu_seqlens` is int32 (B + 1,) on the host, starting at 0."""

    @abstractmethod
    def forward(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        """Hidden states of one packed batch, (T, D) in the model's dtype.

        `input_ids` is int32 or int64 (T,), special tokens included. `repr_layer` 0 is the embedding, n the output of
        layer n, None the last; later layers are not computed.

        Raises:
            UsageError: there is no such layer.
        """

    def embed(self, input_ids: Tensor, layout: PackedLayout, repr_layer: int | None = None) -> Tensor:
        """Mean vectors of `forward`, fp32 (B, D) on the model's device; does not synchronise with the device."""
        hidden_states = self(input_ids, layout, repr_layer)
        return mean_pool(hidden_states, layout.cu_seqlens, include_special_tokens=self.pools_special_tokens)

    @abstractmethod
    def quantize(self) -> None:
        """Converts the linear layers of a bf16 model to fp8, in place."""

    def prepare_inference(self) -> None:
        """Rearranges weights for the kernels of the device, once they are there in their final dtype."""

    def initialise_weights(self) -> None:
        """Sets small normal weights and zero biases, for training from scratch."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def validate_repr_layer(spec: ModelSpec, repr_layer: int | None) -> int:
    """The layer to read, `num_layers` for None.

    Raises:
        UsageError: the model has no such layer.
    """
    if repr_layer is None:
        return spec.num_layers
    if not 0 <= repr_layer <= spec.num_layers:
        raise UsageError(
            f"representation layer {repr_layer} does not exist: this {spec.family} model has "
            f"{spec.num_layers} layers, so choose 0 (embeddings) to {spec.num_layers} (last layer)"
        )
    return repr_layer


def mean_pool(hidden_states: Tensor, cu_seqlens: Tensor, *, include_special_tokens: bool) -> Tensor:
    """The mean hidden state of each sequence, fp32 (B, D), summed token by token in fp32, so independent of its batch.

    `hidden_states` is (T, D), `cu_seqlens` int32 (B + 1,) on its device. DNABERT-S includes the special tokens ([CLS]
    and [SEP]); ESM-2 leaves out the first and last token (BOS and EOS). A sequence with nothing to average gives
    zeros.
    """
    if has_kernels(hidden_states.device) and not torch.is_grad_enabled():
        means: Tensor = torch.ops.virnuc.segment_mean(hidden_states, cu_seqlens, include_special_tokens)
        return means
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
