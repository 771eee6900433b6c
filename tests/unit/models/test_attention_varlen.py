"""The doors to other programs' kernels, with a stand-in for flash-attn, which needs a GPU to be built."""

import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from virnuc_core.errors import UsageError
from virnuc_core.models import attention
from virnuc_core.models.attention import PackedLayout, packed_attention, resolve_attention
from virnuc_core.models.attention_varlen import FlashAttention

LENGTHS = [5, 1, 40, 7]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """What flash-attn documents: (T, N, H) in and out, -slope * |i - j| added to the scores."""
    assert not causal
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    outputs = []
    for begin, end in zip(cu_seqlens_q[:-1], cu_seqlens_k[1:], strict=True):
        scores = torch.einsum("inh,jnh->nij", q[begin:end], k[begin:end]) * q.shape[2] ** -0.5
        if alibi_slopes is not None:
            places = torch.arange(end - begin)
            scores -= alibi_slopes[:, None, None] * (places[:, None] - places).abs()
        outputs.append(torch.einsum("nij,jnh->inh", scores.softmax(-1), v[begin:end]))
    return torch.cat(outputs)


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    vars(module).update(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("scheme", [{"rotary_head_dim": 16}, {"alibi_heads": 3}], ids=["rotary", "alibi"])
def test_flash_attn_is_called_as_it_is_documented(scheme: dict[str, int]) -> None:
    cu_seqlens = np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int32)
    qkv = torch.randn(sum(LENGTHS), 3, 3, 16, generator=torch.Generator().manual_seed(0))
    place = {"device": torch.device("cpu"), "dtype": torch.float32, **scheme}
    layout = PackedLayout.build(cu_seqlens, backend="flash-attn", **place)
    assert isinstance(layout.attention, FlashAttention)
    expected = packed_attention(qkv, PackedLayout.build(cu_seqlens, backend="reference", **place))
    torch.testing.assert_close(packed_attention(qkv, layout), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("installed", "usable"), [("2.8.3", True), ("2.6.0.post1", True), ("2.5.9", False)])
def test_flash_attn_must_be_recent(installed: str, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "version", lambda name: installed)
    if usable:
        assert resolve_attention("flash-attn", "cuda", "dnabert_s", "bf16", 64) == "flash-attn"
    else:
        with pytest.raises(UsageError, match=r"needs flash-attn 2\.6 or later, and 2\.5\.9 is installed"):
            resolve_attention("flash-attn", "cuda", "dnabert_s", "bf16", 64)


def test_flash_attn_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(attention, "version", absent)
    with pytest.raises(UsageError, match=r'pip install "virnuc\[gpu\]"'):
        resolve_attention("flash-attn", "cuda", "esm2", "fp16", 64)
