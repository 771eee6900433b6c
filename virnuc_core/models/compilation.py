"""torch.compile, one layer at a time: the layers of a model are alike, so one graph serves them all."""

import logging
from collections.abc import Callable
from typing import Final

import torch.fx.experimental._config

from virnuc_core.models.encoder import Encoder
from virnuc_core.models.kernels import has_kernels
from virnuc_core.specs import AttentionBackend, CompileMode, ResolvedCompileMode

# Our kernels leave little to fuse: on an H200 compiled layers are 0.2 % faster and take about 4 s to compile, which
# half an hour per GPU repays. The mode must not depend on the number of GPUs, which may change when a run is resumed,
# so eight are assumed.
_REPAID_AFTER_SECONDS: Final = 8 * 1800.0

_COMPILED_ATTENTION: Final = ("triton", "varlen")
_GRAPHS: Final = {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": True}
_OPTIONS: Final[dict[ResolvedCompileMode, dict[str, str | int | bool | Callable[..., object]]]] = {
    "default": {},
    "reduce-overhead": {**_GRAPHS},
    "max-autotune": {**_GRAPHS, "max_autotune": True, "coordinate_descent_tuning": True},
}

_SHAPES_VARY: Final = (
    "compile mode {} records CUDA graphs only where shapes are fixed, and every packed batch has another: it is no faster "
    "than --compile-mode default"
)
_TUNES: Final = ", and takes minutes longer to compile"

_log = logging.getLogger(__name__)


def resolve_compile_mode(
    choice: CompileMode, attention: AttentionBackend, estimated_seconds: float
) -> ResolvedCompileMode:
    """Resolves "auto" and logs the mode.

    Backends that loop over sequences or rectangles are never compiled, since every batch would be compiled again, nor
    is flash-attn, which torch cannot trace. "auto" compiles if `estimated_seconds`, the run's work on one device,
    repay it.
    """
    if attention not in _COMPILED_ATTENTION:
        if choice not in ("auto", "none"):
            _log.warning(
                "layers with %s attention are not compiled, though %s was asked for", attention, choice
            )
        return "none"
    if choice != "auto":
        return choice
    mode: ResolvedCompileMode = "default" if estimated_seconds >= _REPAID_AFTER_SECONDS else "none"
    _log.info("compile mode: %s (about %.0f s of work, asked for: auto)", mode, estimated_seconds)
    return mode


def compile_warning(mode: ResolvedCompileMode) -> str | None:
    """The caveat of a mode for the user who chose it; None if it has none."""
    if not _OPTIONS.get(mode):
        return None
    return _SHAPES_VARY.format(mode) + (_TUNES if mode == "max-autotune" else "") + "."


def compile_layers(model: Encoder, mode: ResolvedCompileMode) -> None:
    """Compiles the layers of a model in place, for any number of tokens; CUDA graphs only record static shapes."""
    if mode == "none":
        return
    # Otherwise sizes that happen to be equal in the first batch share a symbol, and others trigger recompilation.
    torch.fx.experimental._config.use_duck_shape = False
    # It calls the driver, which Dynamo cannot trace.
    torch.compiler.assume_constant_result(has_kernels)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=True, options=_OPTIONS[mode])
