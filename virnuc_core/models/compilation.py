"""torch.compile, one layer at a time: the layers of a model are alike, so one graph serves them all."""

import logging
from collections.abc import Callable
from typing import Final

import torch.fx.experimental._config

from virnuc_core.models.encoder import Encoder
from virnuc_core.models.kernels import has_gemm_gelu, has_kernels
from virnuc_core.specs import AttentionBackend, CompileMode, ResolvedCompileMode

# Our kernels leave little to fuse: on an H200 compiled layers are 0.2 % faster and take about 4 s to compile, so a GPU
# must work for half an hour to gain anything. The mode must not depend on how many GPUs there are, which may change
# when a run is resumed: it is that of a run that repays it on eight.
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
    """Turns "auto" into a mode, and logs it.

    Args:
        choice: as asked for.
        attention: of the model; the backends that loop over sequences or rectangles are never compiled,
            since they would be again for every batch, nor is flash-attn, which torch cannot trace.
        estimated_seconds: the work of the run on one device; "auto" compiles only where that repays it.
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
    """What whoever has chosen a mode may not expect of it."""
    if not _OPTIONS.get(mode):
        return None
    return _SHAPES_VARY.format(mode) + (_TUNES if mode == "max-autotune" else "") + "."


def compile_layers(model: Encoder, mode: ResolvedCompileMode) -> None:
    """Compiles the layers of a model in place, for any number of tokens.

    A CUDA graph holds one shape only, and every packed batch has another, so "reduce-overhead" and
    "max-autotune" record graphs just where shapes are known.
    """
    if mode == "none":
        return
    # Else sizes that are equal by chance in the first batch are taken for one, and compiled for again.
    torch.fx.experimental._config.use_duck_shape = False
    # They call the driver, which Dynamo cannot trace.
    for answer in (has_kernels, has_gemm_gelu):
        torch.compiler.assume_constant_result(answer)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=True, options=_OPTIONS[mode])
