"""Library of virnuc, free of orchestration; importing this package alone loads nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from virnuc_core.api import Embedder, Predictor, embed, open_embeddings, predict

__version__: Final = "0.1.0"

__all__ = [
    "Embedder",
    "Predictor",
    "__version__",
    "embed",
    "open_embeddings",
    "predict",
]


def __getattr__(name: str) -> Any:
    """Loads `virnuc_core.api`, and torch with it, on first use (PEP 562)."""
    if name in __all__:
        return getattr(import_module("virnuc_core.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
