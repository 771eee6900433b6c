"""GPU capabilities and memory, queried without using memory on the GPU."""

import subprocess
import sys

import pytest
import torch

from tests.made_models import make_spec
from virnuc_core.errors import DeviceError
from virnuc_core.inference.device import (
    least_free_memory,
    resolve_devices,
)

pytestmark = pytest.mark.gpu

SPEC = make_spec("esm2", num_layers=36, embedding_dim=2560, num_heads=40, ffn_dim=10_240)
GIGABYTE = 10**9


def test_auto_takes_every_gpu() -> None:
    assert resolve_devices(("auto",)) == tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    with pytest.raises(DeviceError, match="GPU 99 is not available"):
        resolve_devices(("99",))


def test_memory_in_use_is_not_free() -> None:
    device, before = least_free_memory(["cuda:0"])
    assert device == "cuda:0"
    assert 0 < before <= torch.cuda.get_device_properties("cuda:0").total_memory
    held = torch.empty(2 * GIGABYTE, dtype=torch.uint8, device="cuda:0")
    after = least_free_memory(["cuda:0"])[1]
    del held
    torch.cuda.empty_cache()
    assert after <= before - 1.5 * GIGABYTE


def test_planning_leaves_the_gpus_to_the_lanes() -> None:
    """A CUDA context of the planning process would take memory on each GPU for the whole run."""
    command = (
        "import torch; from virnuc_core.inference import device;"
        "found = device.resolve_devices(('auto',));"
        "[device.resolve_precision(precision, found[0]) for precision in ('auto', 'bf16')];"
        "device.least_free_memory(found);"
        "print([torch._C._cuda_hasPrimaryContext(i) for i in range(len(found))])"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert "True" not in done.stdout
