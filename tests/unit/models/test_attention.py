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
each_scheme = pytest.mark.parametrize("alibi_heads", [None, 3], ids=["rotary", "alibi"])


def layout_of(
    lengths: list[int],
    backend: AttentionBackend,
    alibi_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedLayout:
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    device = torch.device("cpu")
    return PackedLayout.build(
        cu_seqlens, backend=backend, device=device, dtype=dtype, head_dim=16, alibi_heads=alibi_heads
    )


def random_qkv(lengths: list[int]) -> torch.Tensor:
    return torch.randn(sum(lengths), 3, 3, 16, generator=torch.Generator().manual_seed(0))


@each_scheme
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    ("padded_share", "max_elements", "max_widened_head"),
    [(1.0, 2**22, 24), (1.25, 1000, 24), (1.25, 500, 0), (100.0, 2**22, 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rectangles_equal_the_reference(
    lengths: list[int],
    alibi_heads: int | None,
    padded_share: float,
    max_elements: int,
    max_widened_head: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Vectors and gradients, also padded and in blocks of queries."""
    expected_layout = layout_of(lengths, "reference", alibi_heads, dtype)
    monkeypatch.setitem(attention._MAX_PADDED_SHARE, "cpu", padded_share)
    for name in ("_MAX_BIAS_ELEMENTS", "_MAX_SCORES"):
        monkeypatch.setattr(attention, name, max_elements)
    monkeypatch.setattr(attention, "_MAX_WIDENED_HEAD", max_widened_head)
    layout = layout_of(lengths, "sdpa", alibi_heads, dtype)
    found = []
    for each in (layout, expected_layout):
        qkv = random_qkv(lengths).to(dtype).requires_grad_()
        states = packed_attention(qkv, each)
        states.square().sum().backward()
        found.append((states.detach(), qkv.grad))
    assert (found[0][0].shape, found[0][0].dtype) == ((sum(lengths), 48), dtype)
    if dtype == torch.bfloat16:
        torch.testing.assert_close(found[0][0], found[1][0], rtol=0.02, atol=0.02)
        return
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=2e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


def test_positions_start_again_in_each_sequence() -> None:
    bounds = torch.tensor([0, 0, 3, 5, 5, 6, 6], dtype=torch.int32)
    assert attention.position_ids(bounds, 6).tolist() == [0, 1, 2, 0, 1, 0]
    assert attention.sequence_index(bounds, 6).tolist() == [1, 1, 1, 2, 2, 4]


def test_equal_lengths_are_read_in_place_and_padding_stays_within_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = layout_of([5, 5, 5, 3, 3], "sdpa").attention
    assert isinstance(found, RectangleAttention)
    assert [(r.num_sequences, r.length, r.first_token) for r in found.rectangles] == [(3, 5, 0), (2, 3, 15)]
    assert all(r.gather_idx is None and r.unpad_idx is None and r.bias is None for r in found.rectangles)
    monkeypatch.setitem(attention._MAX_PADDED_SHARE, "cpu", 1.25)
    lengths = sorted(np.random.default_rng(0).integers(3, 200, 300).tolist(), reverse=True)
    found = layout_of(lengths, "sdpa").attention
    assert isinstance(found, RectangleAttention)
    slots = sum(r.num_sequences * r.length for r in found.rectangles)
    assert sum(lengths) <= slots <= 1.25 * sum(lengths)
    assert len(found.rectangles) < 20


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
    assert "attention of esm2 on cpu: sdpa (requested: auto)" in caplog.text
    assert resolve_attention("reference", "cpu", "dnabert_s", "fp32", 64) == "reference"
    with pytest.raises(DeviceError, match="--attention triton needs a CUDA device"):
        resolve_attention("triton", "cpu", "esm2", "bf16", 64)
    with pytest.raises(
        UsageError, match=f"needs flash-attn-4 {FLASH_ATTN_VERSION} .ImportError: none is inst"
    ):
        resolve_attention("flash-attn", "cuda", "esm2", "fp16", 64)


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_flash_attn_is_taken_where_it_runs(family: Family, flash_attn: Path) -> None:
    assert resolve_attention("flash-attn", "cuda", family, "fp16", 64) == "flash-attn"


NEEDED = f"needs flash-attn-4 {FLASH_ATTN_VERSION}"


@pytest.mark.parametrize(
    ("choice", "family", "precision", "head_dim", "capability", "message"),
    [
        ("triton", "esm2", "fp32", 64, (9, 0), "not fp32 with head width 64"),
        ("triton", "esm2", "fp16", 160, (9, 0), "not fp16 with head width 160"),
        ("flash-attn", "esm2", "fp16", 20, (9, 0), "a multiple of 8, not 20: use sdpa, or omit"),
        ("flash-attn", "esm2", "fp16", 64, (7, 5), "8.0, and this GPU has 7.5: use triton or sdpa"),
        (
            "flash-attn",
            "dnabert_s",
            "fp16",
            64,
            (8, 6),
            "ALiBi .* 9.0, and this GPU has 8.6: use triton",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(
    choice: AttentionChoice,
    family: Family,
    precision: ResolvedPrecision,
    head_dim: int,
    capability: tuple[int, int],
    message: str,
    flash_attn: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(VirnucError, match=message):
        resolve_attention(choice, "cuda", family, precision, head_dim)


@pytest.mark.parametrize(
    ("version", "program", "message"),
    [
        ("4.0.0b36.dev1", "", f"{NEEDED} .ImportError: 4.0.0b36.dev1 is installed.: pip"),
        (FLASH_ATTN_VERSION, "import no_such", f"{NEEDED} .ModuleNotFoundError: No module named 'no_such'"),
        (FLASH_ATTN_VERSION, "raise OSError('libcuda.so.1')", f"{NEEDED} .OSError: libcuda.so.1"),
    ],
)
def test_another_version_of_flash_attn_or_a_broken_one_is_refused(
    version: str, program: str, message: str, flash_attn: Path
) -> None:
    install(flash_attn, version, program)
    with pytest.raises(UsageError, match=message):
        resolve_attention("flash-attn", "cuda", "esm2", "bf16", 64)
