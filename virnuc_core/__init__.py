"""The library of virnuc: sequences, models, runs and results, without any orchestration."""

from typing import Final

__version__: Final = "0.1.0"
