"""Which device runs the kernels, and what happens when a device cannot run one."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from virnuc_core.errors import DeviceError, UsageError
from virnuc_core.models import kernels
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.kernels import has_kernels, resolve_products
from virnuc_core.versions import QUACK_VERSION

CAPABILITIES = [(7, 5), (8, 6), (9, 0), (12, 0)]


def test_each_device_of_a_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.setattr(kernels, "_capability", lambda device: CAPABILITIES[device.index])
    devices = [torch.device("cuda", i) for i in range(len(CAPABILITIES))]
    assert [has_kernels(device) for device in devices] == [False, True, True, True]
    assert not has_kernels(torch.device("cpu"))
    chosen = [resolve_attention("auto", device, "esm2", "fp16", 64) for device in devices]
    assert chosen == ["sdpa", "triton", "triton", "triton"]
    monkeypatch.setattr(kernels, "_HAS_TRITON", False)
    assert not any(map(has_kernels, devices))


def test_quack_multiplies_on_hopper_where_it_is_installed_and_the_widths_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [entry] = find_entries("8M", "esm2")
    installed = {"quack-kernels": QUACK_VERSION}
    monkeypatch.setattr(kernels, "_HAS_TRITON", True)
    monkeypatch.setattr(kernels, "_capability", lambda device: CAPABILITIES[device.index])
    monkeypatch.setattr(kernels, "installed_version", lambda package: installed.get(package, ""))
    monkeypatch.setattr(kernels, "_require_quack", lambda: None)
    devices = [torch.device("cuda", i) for i in range(len(CAPABILITIES))]
    chosen = [resolve_products(device, "fp16", entry.spec) for device in devices]
    assert chosen == ["torch", "torch", "quack", "torch"]
    hopper = devices[2]
    assert resolve_products(hopper, "fp32", entry.spec) == "torch"
    narrow = replace(entry.spec, ffn_dim=1288)  # a multiple of 8, not of 16
    assert [resolve_products(hopper, each, narrow) for each in ("bf16", "fp8")] == ["quack", "torch"]
    installed["quack-kernels"] = "0.6.4"
    assert resolve_products(hopper, "fp16", entry.spec) == "torch"


def test_a_broken_installation_of_quack_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    [entry] = find_entries("8M", "esm2")
    monkeypatch.setattr(kernels, "has_quack", lambda device: True)
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(UsageError, match=r"cannot be imported.*pip uninstall quack-kernels"):
        resolve_products(torch.device("cuda"), "fp16", entry.spec)


def test_a_kernel_that_does_not_fit_is_an_error_of_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.errors import OutOfResources

    from virnuc_core.models.kernels.launch import launch

    class WideKernel:
        """Raises as Triton does on a device with too little shared memory."""

        __name__ = "_wide_kernel"

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert grid == (7,)
            return self._run

        def _run(self, *arguments: Any, **options: Any) -> None:
            assert (arguments, options) == ((1, 2), {"num_warps": 4})
            raise OutOfResources(164_368, 101_376, "shared memory")

    with pytest.raises(DeviceError, match=r"_wide_kernel.*Required: 164368.*--precision fp32"):
        launch(WideKernel(), 7, 1, 2, num_warps=4)
