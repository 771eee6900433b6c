"""Stand-in for flash_attn where only torch is installed: the same module name over torch's FA2 kernel.

It has only what esm-efficient calls at inference. The algorithm is that of flash-attn 2; flash-attn-4 has the same module
name but none of this API.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import Tensor

from virnuc_core.versions import installed_version


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: object,
) -> Tensor:
    """Attention of packed sequences, (T, N, H) in and out; supports only causal=False."""
    if options.get("causal"):
        raise NotImplementedError("the stand-in for flash_attn has bidirectional attention only")
    lengths = (int(max_seqlen_q), int(max_seqlen_k))
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths, 0.0, False, False, scale=q.shape[-1] ** -0.5
    )[0]
    return output


def is_needed() -> bool:
    """Whether flash-attn 2 is missing."""
    return not installed_version("flash-attn")


def provide() -> None:
    """Makes `import flash_attn` work."""
    if is_needed():
        package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
        package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
        vars(padding).update(pad_input=None, unpad_input=None)  # imported, never called on packed input
        vars(package).update(__version__="2.8.3", __path__=[])
        vars(package).update(flash_attn_varlen_func=varlen_attention, bert_padding=padding)
        sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
