"""What makes a run slower than it could be on its hardware: it is allowed, and never silent."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from virnuc_core.models.compilation import compile_warning
from virnuc_core.models.kernels import MIN_CAPABILITY
from virnuc_core.run_plan import PlannedModel


def speed_warnings(models: Sequence[PlannedModel], devices: Sequence[str]) -> tuple[str, ...]:
    """One sentence for each thing that a person may want to change.

    Args:
        models: as planned.
        devices: "cpu" alone, or GPUs.
    """
    found = list(dict.fromkeys(filter(None, (compile_warning(model.compile_mode) for model in models))))
    in_half = any(model.precision != "fp32" for model in models)
    if devices[0] != "cpu" and in_half and (reason := _why_no_kernels(devices)):
        found.append(
            f"{reason}: virnuc's kernels cannot run, and plain torch is several times slower. `virnuc doctor` says more."
        )
    return tuple(found)


def _why_no_kernels(devices: Sequence[str]) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    for device in devices:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < MIN_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return f"{device} ({name}) has compute capability {major}.{minor}, below 8.0"
    return None
