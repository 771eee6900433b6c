import numpy as np
import pytest
import torch

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.models import attention, attention_plain
from virnuc_core.models.attention import PackedLayout, packed_attention, resolve_attention
from virnuc_core.models.attention_plain import RectangleAttention
from virnuc_core.specs import AttentionBackend, AttentionChoice, Family, ResolvedPrecision

CPU = torch.device("cpu")
LENGTHS = [
    [7],
    [5, 5, 5],
    [1, 2, 30, 31, 29, 30, 3, 64],
    [64, 33, 33, 2, 1, 1],
    [4, 0, 6],
]
SCHEMES = [{"rotary_head_dim": 16}, {"alibi_heads": 3}, {}]


def _layout(lengths: list[int], backend: AttentionBackend, scheme: dict[str, int]) -> PackedLayout:
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return PackedLayout.build(cu_seqlens, backend=backend, device=CPU, dtype=torch.float32, **scheme)


def _qkv(lengths: list[int], head_dim: int = 16) -> torch.Tensor:
    return torch.randn(sum(lengths), 3, 3, head_dim, generator=torch.Generator().manual_seed(0))


def _rectangles(lengths: list[int], backend: AttentionBackend) -> RectangleAttention:
    found = _layout(lengths, backend, {}).attention
    assert isinstance(found, RectangleAttention)
    return found


@pytest.mark.parametrize("scheme", SCHEMES, ids=["rotary", "alibi", "plain"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    ("backend", "padded_share"), [("sdpa", 1.0), ("sdpa", 1.25), ("sdpa", 100.0), ("padded", 1.0)]
)
def test_every_backend_equals_the_reference(
    lengths: list[int],
    scheme: dict[str, int],
    backend: AttentionBackend,
    padded_share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Vectors and gradients."""
    monkeypatch.setitem(attention._MAX_PADDED_SHARE, "cpu", padded_share)
    found = []
    for layout in (_layout(lengths, backend, scheme), _layout(lengths, "reference", scheme)):
        qkv = _qkv(lengths).requires_grad_()
        states = packed_attention(qkv, layout)
        states.square().sum().backward()
        found.append((states.detach(), qkv.grad))
    assert found[0][0].shape == (sum(lengths), 48)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=2e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)
    if backend == "padded":
        assert len(_rectangles(lengths, backend).rectangles) == 1


def test_reference_is_softmax_attention_with_alibi() -> None:
    lengths = [6, 3]
    qkv = _qkv(lengths)
    actual = packed_attention(qkv, _layout(lengths, "reference", {"alibi_heads": 3}))
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    for begin, end in [(0, 6), (6, 9)]:
        for head, slope in enumerate(slopes):
            q, k, v = qkv[begin:end, :, head].unbind(1)
            distance = (torch.arange(end - begin)[:, None] - torch.arange(end - begin)).abs()
            expected = (q @ k.T / 4 - slope * distance).softmax(-1) @ v
            torch.testing.assert_close(actual[begin:end, 16 * head : 16 * (head + 1)], expected)


@pytest.mark.parametrize("backend", ["sdpa", "padded", "reference"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=["rotary", "alibi", "plain"])
def test_blocks_of_queries_change_nothing(
    backend: AttentionBackend, scheme: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [64, 40, 40, 3]
    qkv = _qkv(lengths)
    expected = packed_attention(qkv, _layout(lengths, "reference", scheme))
    monkeypatch.setattr(attention_plain, "_MAX_BIAS_ELEMENTS", 1000)
    layout = _layout(lengths, backend, scheme)
    if isinstance(layout.attention, RectangleAttention):
        assert all(r.bias is None or r.bias.numel() <= 1000 for r in layout.attention.rectangles)
    torch.testing.assert_close(packed_attention(qkv, layout), expected, rtol=0, atol=2e-6)


def test_equal_lengths_are_read_in_place() -> None:
    found = _rectangles([5, 5, 5, 3, 3], "sdpa")
    assert [(r.num_sequences, r.length, r.first_token) for r in found.rectangles] == [(3, 5, 0), (2, 3, 15)]
    assert all(r.gather_idx is None and r.unpad_idx is None and r.bias is None for r in found.rectangles)


def test_padding_stays_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention._MAX_PADDED_SHARE, "cpu", 1.25)
    lengths = sorted(np.random.default_rng(0).integers(3, 200, 300).tolist(), reverse=True)
    rectangles = _rectangles(lengths, "sdpa").rectangles
    slots = sum(r.num_sequences * r.length for r in rectangles)
    assert sum(lengths) <= slots <= 1.25 * sum(lengths)
    assert len(rectangles) < 20


def test_auto_is_resolved_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert resolve_attention("auto", "cpu", "esm2", "fp32", 64) == "sdpa"
    assert "attention of esm2 on cpu: sdpa (asked for: auto)" in caplog.text
    assert resolve_attention("reference", "cpu", "dnabert_s", "fp32", 64) == "reference"


@pytest.mark.parametrize(
    ("choice", "device", "family", "precision", "head_dim", "error", "message"),
    [
        ("triton", "cpu", "esm2", "bf16", 64, DeviceError, "--attention triton needs a CUDA device"),
        ("triton", "cuda", "esm2", "fp32", 64, UsageError, "not in fp32 with heads of 64"),
        ("varlen", "cuda", "esm2", "fp16", 160, UsageError, "not in fp16 with heads of 160"),
        ("varlen", "cuda", "dnabert_s", "fp16", 64, UsageError, "varlen has no ALiBi"),
        ("flash-attn", "cuda", "esm2", "fp16", 64, UsageError, "4.0.0b36, and none is installed"),
    ],
)
def test_what_cannot_be_done_is_refused(
    choice: AttentionChoice,
    device: str,
    family: Family,
    precision: ResolvedPrecision,
    head_dim: int,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        resolve_attention(choice, device, family, precision, head_dim)
