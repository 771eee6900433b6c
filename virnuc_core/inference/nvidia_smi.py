"""What nvidia-smi says of the GPUs: asked in a process of its own, it makes no CUDA context in this one."""

import logging
import subprocess
from collections.abc import Sequence
from typing import Final

_SECONDS: Final = 20.0

_log = logging.getLogger(__name__)


def query_gpus(fields: Sequence[str], *, units: bool) -> list[tuple[str, ...]]:
    """Properties of every GPU, one row each; no rows where nvidia-smi is not there or does not tell.

    Args:
        fields: as `nvidia-smi --help-query-gpu` names them.
        units: whether numbers come with their units.
    """
    layout = "csv,noheader" if units else "csv,noheader,nounits"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", f"--format={layout}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("nvidia-smi does not tell: %s", error)
        return []
    return [tuple(value.strip() for value in line.split(",")) for line in done.stdout.splitlines()]
