"""Attention by the variable-length kernels of torch and of flash-attn, for comparison with our own.

Shapes: T tokens, N heads, H head dim.
"""

from dataclasses import dataclass

from torch import Tensor

from virnuc_core.models.attention_plain import turned


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """torch.nn.attention.varlen, which has no ALiBi.

    Attributes:
        cu_seqlens: int32 (B + 1,), on the device.
        max_seqlen: tokens of the longest sequence.
        table: rotary table at the T positions.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    table: Tensor

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        from torch.nn.attention.varlen import varlen_attn  # torch has it from 2.10 on

        q, k, v = turned(qkv, self.table)
        bounds, longest = self.cu_seqlens, self.max_seqlen
        output = varlen_attn(q, k, v.contiguous(), bounds, bounds, longest, longest)
        assert isinstance(output, Tensor)  # a tuple only where auxiliary results are asked for
        return output.flatten(1)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """flash_attn.flash_attn_varlen_func, version 2.6 or later.

    Attributes:
        cu_seqlens: int32 (B + 1,), on the device.
        max_seqlen: tokens of the longest sequence.
        table: rotary table at the T positions; None with ALiBi.
        slopes: fp32 (N,), ALiBi; None with rotary positions.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    table: Tensor | None
    slopes: Tensor | None

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, 3, N, H) -> (T, N * H)."""
        from flash_attn import flash_attn_varlen_func  # optional, so only where it was chosen

        q, k, v = turned(qkv, self.table)
        bounds, longest = self.cu_seqlens, self.max_seqlen
        output: Tensor = flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest, causal=False, alibi_slopes=self.slopes
        )
        return output.flatten(1)
