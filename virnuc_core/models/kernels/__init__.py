"""Kernels for CUDA devices, of Triton and of QuACK.

Their modules import these packages, so they are imported where `has_kernels` and `resolve_products` say that they run.
"""

import logging
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from virnuc_core.errors import UsageError
from virnuc_core.specs import ModelSpec, ProductBackend, ResolvedPrecision
from virnuc_core.versions import QUACK, QUACK_VERSION, installed_version

MIN_CAPABILITY: Final = (8, 0)  # compute capability of Ampere
_HAS_TRITON: Final = torch.cuda.is_available() and find_spec("triton") is not None

_log = logging.getLogger(__name__)


def has_kernels(device: torch.device) -> bool:
    """Whether the device runs the kernels, which need Ampere (compute capability 8.0) or later."""
    return _HAS_TRITON and device.type == "cuda" and _capability(device) >= MIN_CAPABILITY


@lru_cache(maxsize=64)  # called several times per layer
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_quack(device: torch.device) -> bool:
    """Whether the device runs QuACK's matrix products: a Hopper GPU, where the known version is installed."""
    return has_kernels(device) and _capability(device)[0] == 9 and installed_version(QUACK) == QUACK_VERSION


def resolve_products(device: torch.device, precision: ResolvedPrecision, spec: ModelSpec) -> ProductBackend:
    """What multiplies the matrices of a model on a device, logged: QuACK where it runs, but not in fp32.

    Raises:
        UsageError: QuACK is installed, but cannot be imported.
    """
    bytes_each = 1 if precision == "fp8" else 2
    fits = not any(width * bytes_each % 16 for width in (spec.embedding_dim, spec.ffn_dim))
    backend: ProductBackend = "quack" if precision != "fp32" and fits and has_quack(device) else "torch"
    _log.info("matrix products of %s in %s on %s: %s", spec.family, precision, device, backend)
    if backend == "quack":
        _require_quack()
    return backend


def _require_quack() -> None:
    try:
        import_module(f"{__name__}.products")
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"{QUACK} {QUACK_VERSION} is installed, but cannot be imported ({type(error).__name__}: {error}): "
            f"pip install --force-reinstall 'virnuc[gpu]', or pip uninstall {QUACK}, to multiply with torch."
        ) from error


def keep_out_of_graphs() -> None:
    """Has torch's compiler call the kernels as they are, between its graphs."""
    torch.compiler.assume_constant_result(has_kernels)  # it calls the driver, which Dynamo cannot trace
    if _HAS_TRITON:
        for module, name in (("gemm_gelu", "linear_gelu"), ("rowwise", "add_norm")):
            kernels = import_module(f"{__name__}.{module}")
            setattr(kernels, name, torch.compiler.disable(getattr(kernels, name)))
