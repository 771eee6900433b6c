"""Attention backends on the CPU against the reference, and which backend runs where."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from virnuc_core.errors import DeviceError, UsageError, VirnucError
from virnuc_core.models import attention
from virnuc_core.models.attention import PackedLayout, RectangleAttention, packed_attention, resolve_attention
from virnuc_core.specs import AttentionBackend, AttentionChoice, Family, ResolvedPrecision
from virnuc_core.versions import FLASH_ATTN_VERSION

LENGTHS = [
    [7],
    [5, 5, 5],
    [1, 2, 30, 31, 29, 30, 3, 64],
    [64, 33, 33, 2, 1, 1],
    [4, 0, 6],
]
each_scheme = pytest.mark.parametrize(
    "scheme", [{"rotary_head_dim": 16}, {"alibi_heads": 3}, {}], ids=["rotary", "alibi", "plain"]
)


def layout_of(
    lengths: list[int],
    backend: AttentionBackend,
    scheme: dict[str, int],
    dtype: torch.dtype = torch.float32,
) -> PackedLayout:
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return PackedLayout.build(cu_seqlens, backend=backend, device=torch.device("cpu"), dtype=dtype, **scheme)


def random_qkv(lengths: list[int]) -> torch.Tensor:
    return torch.randn(sum(lengths), 3, 3, 16, generator=torch.Generator().manual_seed(0))


def rectangles_of(lengths: list[int], backend: AttentionBackend) -> RectangleAttention:
    found = layout_of(lengths, backend, {}).attention
    assert isinstance(found, RectangleAttention)
    return found


@each_scheme
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("padded_share", [1.0, 1.25, 100.0])
def test_rectangles_equal_the_reference(
    lengths: list[int], scheme: dict[str, int], padded_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors and gradients."""
    monkeypatch.setitem(attention._MAX_PADDED_SHARE, "cpu", padded_share)
    found = []
    for layout in (layout_of(lengths, "sdpa", scheme), layout_of(lengths, "reference", scheme)):
        qkv = random_qkv(lengths).requires_grad_()
        states = packed_attention(qkv, layout)
        states.square().sum().backward()
        found.append((states.detach(), qkv.grad))
    assert found[0][0].shape == (sum(lengths), 48)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=2e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


@each_scheme
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("max_widened_head", [0, 24], ids=["products", "widened"])
@pytest.mark.parametrize(("padded_share", "max_scores"), [(1.0, 2**22), (1.25, 500), (100.0, 2**22)])
def test_bf16_equals_the_reference(
    lengths: list[int],
    scheme: dict[str, int],
    padded_share: float,
    max_scores: int,
    max_widened_head: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(attention._MAX_PADDED_SHARE, "cpu", padded_share)
    monkeypatch.setattr(attention, "_MAX_SCORES", max_scores)
    monkeypatch.setattr(attention, "_MAX_WIDENED_HEAD", max_widened_head)
    qkv = random_qkv(lengths).bfloat16()
    found, expected = (
        packed_attention(qkv, layout_of(lengths, backend, scheme, torch.bfloat16))
        for backend in ("sdpa", "reference")
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_reference_is_softmax_attention_with_alibi() -> None:
    lengths = [6, 3]
    qkv = random_qkv(lengths)
    actual = packed_attention(qkv, layout_of(lengths, "reference", {"alibi_heads": 3}))
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    for begin, end in [(0, 6), (6, 9)]:
        for head, slope in enumerate(slopes):
            q, k, v = qkv[begin:end, :, head].unbind(1)
            distance = (torch.arange(end - begin)[:, None] - torch.arange(end - begin)).abs()
            expected = (q @ k.T / 4 - slope * distance).softmax(-1) @ v
            torch.testing.assert_close(actual[begin:end, 16 * head : 16 * (head + 1)], expected)


@each_scheme
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_blocks_of_queries_change_nothing(
    backend: AttentionBackend, scheme: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [64, 40, 40, 3]
    qkv = random_qkv(lengths)
    expected = packed_attention(qkv, layout_of(lengths, "reference", scheme))
    monkeypatch.setattr(attention, "_MAX_BIAS_ELEMENTS", 1000)
    layout = layout_of(lengths, backend, scheme)
    if isinstance(layout.attention, RectangleAttention):
        assert all(r.bias is None or r.bias.numel() <= 1000 for r in layout.attention.rectangles)
    torch.testing.assert_close(packed_attention(qkv, layout), expected, rtol=0, atol=2e-6)


def test_equal_lengths_are_read_in_place() -> None:
    found = rectangles_of([5, 5, 5, 3, 3], "sdpa")
    assert [(r.num_sequences, r.length, r.first_token) for r in found.rectangles] == [(3, 5, 0), (2, 3, 15)]
    assert all(r.gather_idx is None and r.unpad_idx is None and r.bias is None for r in found.rectangles)


def test_padding_stays_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention._MAX_PADDED_SHARE, "cpu", 1.25)
    lengths = sorted(np.random.default_rng(0).integers(3, 200, 300).tolist(), reverse=True)
    rectangles = rectangles_of(lengths, "sdpa").rectangles
    slots = sum(r.num_sequences * r.length for r in rectangles)
    assert sum(lengths) <= slots <= 1.25 * sum(lengths)
    assert len(rectangles) < 20


# The choice of a backend, with fake packages; tests/gpu tests the real ones.


@pytest.fixture
def flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path with the package, and a Hopper GPU."""
    attention._flash_attn.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    install(tmp_path, FLASH_ATTN_VERSION, "def flash_attn_varlen_func(): ...")
    yield tmp_path
    attention._flash_attn.cache_clear()
    for name in ("flash_attn.cute", "flash_attn"):
        sys.modules.pop(name, None)


def install(site: Path, version: str, program: str) -> None:
    (site / "flash_attn" / "cute" / "__init__.py").write_text(program)
    records = site / "flash_attn_4.dist-info"
    records.mkdir(exist_ok=True)
    (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")


def test_the_backend_chosen_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert resolve_attention("auto", "cpu", "esm2", "fp32", 64) == "sdpa"
    assert "attention of esm2 on cpu: sdpa (asked for: auto)" in caplog.text
    assert resolve_attention("reference", "cpu", "dnabert_s", "fp32", 64) == "reference"
    with pytest.raises(DeviceError, match="--attention triton needs a CUDA device"):
        resolve_attention("triton", "cpu", "esm2", "bf16", 64)
    with pytest.raises(UsageError, match=f"needs flash-attn-4 {FLASH_ATTN_VERSION}, and none is installed"):
        resolve_attention("flash-attn", "cuda", "esm2", "fp16", 64)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_flash_attn_is_taken_where_it_runs(family: Family) -> None:
    assert resolve_attention("flash-attn", "cuda", family, "fp16", 64) == "flash-attn"


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("choice", "family", "precision", "head_dim", "capability", "error", "message"),
    [
        ("triton", "esm2", "fp32", 64, (9, 0), UsageError, "not in fp32 with heads of 64"),
        ("triton", "esm2", "fp16", 160, (9, 0), UsageError, "not in fp16 with heads of 160"),
        (
            "flash-attn",
            "esm2",
            "fp16",
            20,
            (9, 0),
            UsageError,
            "a multiple of 8, not of 20: use sdpa, or lea",
        ),
        (
            "flash-attn",
            "esm2",
            "fp16",
            64,
            (7, 5),
            DeviceError,
            "8.0 or later, and this one has 7.5: use triton or sdpa",
        ),
        (
            "flash-attn",
            "dnabert_s",
            "fp16",
            64,
            (8, 6),
            DeviceError,
            "ALiBi .* 9.0 or later, and this one has 8.6: use triton",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(
    choice: AttentionChoice,
    family: Family,
    precision: ResolvedPrecision,
    head_dim: int,
    capability: tuple[int, int],
    error: type[VirnucError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(error, match=message):
        resolve_attention(choice, "cuda", family, precision, head_dim)


@pytest.mark.parametrize(
    ("version", "program", "message"),
    [
        (
            "4.0.0b36.dev1",
            "",
            f"needs flash-attn-4 {FLASH_ATTN_VERSION}, and 4.0.0b36.dev1 is installed: pip ",
        ),
        ("4.0.0", "", f"needs flash-attn-4 {FLASH_ATTN_VERSION}, and 4.0.0 is installed: pip install"),
        (FLASH_ATTN_VERSION, "import no_such", "be imported .ModuleNotFoundError: No module named 'no_such'"),
        (FLASH_ATTN_VERSION, "raise OSError('libcuda.so.1')", "be imported .OSError: libcuda.so.1"),
    ],
)
def test_another_version_of_flash_attn_or_a_broken_one_is_refused(
    version: str, program: str, message: str, flash_attn: Path
) -> None:
    install(flash_attn, version, program)
    with pytest.raises(UsageError, match=message):
        resolve_attention("flash-attn", "cuda", "esm2", "bf16", 64)
