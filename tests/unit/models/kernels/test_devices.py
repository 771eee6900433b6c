"""Which device runs the kernels, and what happens when a device cannot run one."""

from typing import Any

import pytest
import torch

from virnuc_core.errors import DeviceError
from virnuc_core.models import kernels
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.kernels import has_kernels

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
