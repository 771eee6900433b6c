"""Python, torch, CUDA and the GPUs: what is there, whether it goes together, and what "auto" makes of it."""

import platform
from collections.abc import Iterator

import torch

from virnuc_core import __version__
from virnuc_core.doctor.finding import Finding
from virnuc_core.env_config import available_threads, env
from virnuc_core.inference.device import cpu_has_bf16, least_free_memory, resolve_precision
from virnuc_core.inference.nvidia_smi import query_gpus
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.catalogue import CATALOGUE
from virnuc_core.versions import (
    FLASH_ATTN,
    FLASH_ATTN_VERSION,
    OLDEST_DRIVER,
    State,
    check_versions,
    installed_version,
    is_older,
    triton_of_torch,
)

_LEAST_FREE_GB = 4.0
# The kernels need what came with this generation (Ampere).
_TRIED_CAPABILITY = (8, 0)


def version_findings() -> Iterator[Finding]:
    """Each package of the table of known versions."""
    yield Finding(topic="versions", name="virnuc", state="ok", found=__version__)
    for check in check_versions():
        yield Finding(
            topic="versions",
            name=check.package,
            state=check.state,
            found=check.found or "not installed",
            advice=check.advice,
            is_device=check.package in ("torch", "triton", FLASH_ATTN),
        )


def cuda_findings() -> Iterator[Finding]:
    """The CUDA of torch, the driver, triton and flash-attn-4, and whether they go together."""
    rows = query_gpus(("driver_version",), units=False)
    driver = rows[0][0] if rows else ""
    seen = torch.cuda.device_count()
    yield _cuda(driver, len(rows), seen)
    yield _triton(is_needed=seen > 0)
    if version := installed_version(FLASH_ATTN):
        found = f"{version}; used with --attention flash-attn only"
        advice = (
            ""
            if version == FLASH_ATTN_VERSION
            else f"that takes {FLASH_ATTN_VERSION} only: pip install 'virnuc[gpu]'"
        )
        yield _on_device("cuda", FLASH_ATTN, "warning", found, advice)


def device_findings() -> Iterator[Finding]:
    """Every device that runs may use, with what "auto" chooses there."""
    for index in range(torch.cuda.device_count()):
        yield _gpu(f"cuda:{index}")
    bf16 = "with bf16 instructions" if cpu_has_bf16() else "without bf16 instructions"
    found = f"{platform.machine()}, {available_threads()} threads, {bf16}; auto: {_choices('cpu')}"
    yield Finding(topic="devices", name="cpu", state="ok", found=found)


def _cuda(driver: str, num_gpus: int, seen: int) -> Finding:
    """The build of torch against the driver."""
    built_for = torch.version.cuda
    found = f"torch for CUDA {built_for or 'none (CPU only)'}, driver {driver or 'none'}, {seen} of {num_gpus} GPUs seen"
    advice = ""
    visible = env().cuda_visible_devices
    if num_gpus and not seen and visible != ():
        oldest = OLDEST_DRIVER.get(int(built_for.split(".")[0])) if built_for else None
        if not built_for:
            advice = (
                "this torch is for the CPU alone: install the CUDA build, as PyTorch's installation page says"
            )
        elif oldest and is_older(driver, str(oldest)):
            advice = (
                f"CUDA {built_for} needs driver {oldest} or later: update the driver, or take an older torch"
            )
        elif visible is not None:
            advice = f"CUDA_VISIBLE_DEVICES is {','.join(visible)!r}: unset it to use the GPUs"
        else:
            advice = "torch cannot use the GPUs: see whether nvidia-smi and a restart of the driver help"
    return _on_device("cuda", "torch", "problem", found, advice)


def _triton(*, is_needed: bool) -> Finding:
    """Triton against what torch was made for."""
    found, wanted = installed_version("triton"), triton_of_torch()
    advice = ""
    if is_needed and not found:
        advice = f"the fast kernels need it: pip install triton{f'=={wanted}' if wanted else ''}"
    elif found and wanted and found != wanted:
        advice = f"this torch was made for triton {wanted}: pip install triton=={wanted}"
    asked = f", torch asks for {wanted}" if wanted else ""
    return _on_device("cuda", "triton", "warning", f"{found or 'not installed'}{asked}", advice)


def _gpu(device: str) -> Finding:
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    _, free = least_free_memory([device])
    found = (
        f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {free / 1e9:.0f} GB free, compute capability "
        f"{properties.major}.{properties.minor}; auto: {_choices(device)}"
    )
    advice = ""
    if capability < _TRIED_CAPABILITY:
        advice = "nobody has tried GPUs older than compute capability 8.0: compare with --devices cpu first"
    elif free / 1e9 < _LEAST_FREE_GB:
        advice = "other programs use its memory: see nvidia-smi, or choose others with --devices"
    return _on_device("devices", device, "warning", found, advice)


def _on_device(topic: str, name: str, state: State, found: str, advice: str) -> Finding:
    """What was found of a GPU or of what computes on it; without advice it is fine."""
    return Finding(
        topic=topic, name=name, state=state if advice else "ok", found=found, advice=advice, is_device=True
    )


def _choices(device: str) -> str:
    """What "auto" means on a device, for a large model of each family."""
    precision = resolve_precision("auto", device)
    chosen = {}
    for entry in CATALOGUE:
        if entry.name in ("650M", "DNABERT-S"):
            head_dim = entry.spec.head_dim
            chosen[entry.name] = resolve_attention("auto", device, entry.family, precision, head_dim)
    attention = " and ".join(dict.fromkeys(chosen.values()))
    return f"{precision}, {attention} attention"
