"""What --attention flash-attn refuses, with fake packages; its kernels are tested on GPUs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from virnuc_core.errors import DeviceError, UsageError, VirnucError
from virnuc_core.models import attention
from virnuc_core.models.attention import resolve_attention
from virnuc_core.specs import Family
from virnuc_core.versions import FLASH_ATTN_VERSION

ENTRY = "def flash_attn_varlen_func(): ..."


@pytest.fixture(autouse=True)
def _forget_the_package() -> Iterator[None]:
    attention._flash_attn.cache_clear()
    yield
    attention._flash_attn.cache_clear()
    for name in ("flash_attn.cute", "flash_attn"):
        sys.modules.pop(name, None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on the import path, and a Hopper GPU."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return tmp_path


def install(site: Path, version: str, program: str) -> None:
    folder = site / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(program)
    records = site / f"flash_attn_4-{version}.dist-info"
    records.mkdir()
    (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["4.0.0b36.dev1", "4.0.0"])
def test_only_the_version_that_was_tested_is_taken(version: str, site: Path) -> None:
    install(site, version, ENTRY)
    wanted = f"needs flash-attn-4 {FLASH_ATTN_VERSION}, and {version} is installed"
    with pytest.raises(UsageError, match=wanted) as caught:
        resolve_attention("flash-attn", "cuda", "esm2", "bf16", 64)
    assert 'pip install "virnuc[gpu]"' in str(caught.value)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import no_such_compiler", "ModuleNotFoundError: No module named 'no_such_compiler'"),
        ("raise OSError('libcuda.so.1: cannot open')", "OSError: libcuda.so.1: cannot open"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_the_reason(
    program: str, reason: str, site: Path
) -> None:
    install(site, FLASH_ATTN_VERSION, program)
    with pytest.raises(UsageError, match=f"cannot be imported .{reason}"):
        resolve_attention("flash-attn", "cuda", "esm2", "bf16", 64)


@pytest.mark.parametrize("family", ["esm2", "dnabert_s"])
def test_it_is_taken_where_it_runs(family: Family, site: Path) -> None:
    install(site, FLASH_ATTN_VERSION, ENTRY)
    assert resolve_attention("flash-attn", "cuda", family, "fp16", 64) == "flash-attn"


@pytest.mark.parametrize(
    ("family", "head_dim", "capability", "error", "message"),
    [
        ("esm2", 20, (9, 0), UsageError, "a multiple of 8, not of 20: use sdpa, or leave"),
        ("esm2", 64, (7, 5), DeviceError, "compute capability 8.0 or later, and this one has 7.5: use sdpa"),
        ("dnabert_s", 64, (8, 6), DeviceError, "no ALiBi, .* on GPUs of compute capability 8.6: use triton"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    family: Family,
    head_dim: int,
    capability: tuple[int, int],
    error: type[VirnucError],
    message: str,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(site, FLASH_ATTN_VERSION, ENTRY)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(error, match=message):
        resolve_attention("flash-attn", "cuda", family, "fp16", head_dim)
