"""Whether this host, and a GPU of it, are fit for a job; leaves torch and CUDA out of the process that asks.

As a program (`python -m virnuc_core.doctor.preflight`) it computes on the GPU of CUDA_VISIBLE_DEVICES and says on
standard error what is wrong.
"""

import os
import re
import shutil
import sys
import tempfile
from typing import Final

from virnuc_core import __version__
from virnuc_core.env_config import env
from virnuc_core.versions import series

_LEAST_DISK_GB: Final = 0.5


def host_fault() -> str | None:
    """What is wrong with the disk of VIRNUC_HOME; None when nothing is. A missing home is created by the first run."""
    home = env().home
    existing = next(path for path in (home, *home.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / 1e9
    except OSError as error:
        return f"{home} cannot be written ({error.strerror}): set VIRNUC_HOME to one that can"
    if free < _LEAST_DISK_GB:
        return f"only {free:.1f} GB free in {home}: free up space, or set VIRNUC_HOME to a folder on another disk"
    return None


def version_fault(deployed: str | None) -> str | None:
    """Why this virnuc cannot do jobs of a deployment of another release; None when it can, or that is of no release."""
    if not re.match(r"\d+\.\d", deployed or "") or series(deployed or "") == series(__version__):
        return None
    return (
        f"virnuc {__version__} is installed, but the deployment is of {deployed}: install that version, or run "
        "`virnuc server deploy`"
    )


def gpu_fault() -> str | None:
    """What is wrong with the first GPU that this process sees; None when its products are right."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU: check nvidia-smi and the driver"
    generator = torch.Generator().manual_seed(0)
    # Sums of 128 products of numbers up to 3 are exact in fp16.
    left, right = (
        torch.randint(-3, 4, shape, generator=generator).float() for shape in ((4096, 128), (128, 4096))
    )
    expected = left @ right
    for dtype in (torch.float32, torch.float16):
        found = left.to("cuda", dtype) @ right.to("cuda", dtype)
        if not torch.equal(found.float().cpu(), expected):
            return f"a {dtype} matrix product is wrong: do not use this GPU"
    return None


if __name__ == "__main__":
    sys.exit(gpu_fault())
