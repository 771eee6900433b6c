"""GPU queries through nvidia-smi, which create no CUDA context in this process."""

import logging
import subprocess
from collections.abc import Sequence
from typing import Final

_SECONDS: Final = 20.0

_log = logging.getLogger(__name__)


def query_gpus(fields: Sequence[str], *, units: bool) -> list[tuple[str, ...]]:
    """One row per GPU, empty if nvidia-smi is unavailable; for `fields` see `nvidia-smi --help-query-gpu`."""
    layout = "csv,noheader" if units else "csv,noheader,nounits"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", f"--format={layout}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("nvidia-smi does not tell: %s", error)
        return []
    return [tuple(value.strip() for value in line.split(",")) for line in done.stdout.splitlines()]
