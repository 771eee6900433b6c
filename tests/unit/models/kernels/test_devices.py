"""Which device runs the kernels, and what happens when a device cannot run one."""

import sys
from typing import Any

import pytest
import torch

from virnuc_core.errors import DeviceError
from virnuc_core.models import kernels, layers
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.encoders import Encoder
from virnuc_core.models.kernels import has_kernels

CAPABILITIES = [(7, 5), (8, 6), (9, 0), (12, 0)]


def test_each_device_of_a_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_REGISTERED", True)
    monkeypatch.setattr(kernels, "_capability", lambda device: CAPABILITIES[device.index])
    devices = [torch.device("cuda", i) for i in range(len(CAPABILITIES))]
    assert [has_kernels(device) for device in devices] == [False, True, True, True]
    assert not has_kernels(torch.device("cpu"))
    chosen = [resolve_attention("auto", device, "esm2", "fp16", 64) for device in devices]
    assert chosen == ["sdpa", "triton", "triton", "triton"]
    monkeypatch.setattr(kernels, "_REGISTERED", False)
    assert not any(map(has_kernels, devices))


class OneLayer(torch.nn.Module):
    """Requests the kernels of a device as the models' layers do."""

    device = torch.device("cuda", 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if layers.has_kernels(self.device) else 1.0)


def test_compiled_layers_take_the_answer_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    def capability(device: torch.device) -> tuple[int, int]:
        sys._getframe()  # not traceable by Dynamo, like the driver's calls
        return 9, 0

    monkeypatch.setattr(kernels, "_REGISTERED", True)
    monkeypatch.setattr(kernels, "_capability", capability)
    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList([OneLayer()])
    Encoder.compile_layers(model, "triton")
    torch.compiler.reset()
    traced = torch.compile(OneLayer(), backend="eager", fullgraph=True)
    assert torch.equal(traced(torch.ones(3)), torch.full((3,), 2.0))


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
