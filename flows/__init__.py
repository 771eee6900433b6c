"""The flows of virnuc, and the work pools that their runs go to."""

from typing import Final

GPU_POOL: Final = "virnuc-gpu"
CPU_POOL: Final = "virnuc-cpu"
RUNS_POOL: Final = "virnuc-runs"
