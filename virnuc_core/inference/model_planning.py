"""How each model of a run computes: precision, engine, attention and batch size, decided once and logged."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from virnuc_core.env_config import env
from virnuc_core.errors import UsageError
from virnuc_core.inference.device import default_token_budget, resolve_precision
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.encoder import validate_repr_layer
from virnuc_core.models.weights import read_spec, weights_fingerprint
from virnuc_core.run_plan import PlannedModel, RunPlan
from virnuc_core.settings import RunConfig
from virnuc_core.specs import (
    AttentionBackend,
    AttentionChoice,
    Engine,
    Family,
    ModelSpec,
    Precision,
    ResolvedPrecision,
)

_REFERENCE_TOKEN_BUDGET: Final = 1  # every sequence is over it, so each one runs alone
_MAX_TOKEN_BUDGET: Final = 2**31 - 1  # more than any device holds; sums over batches stay within 64 bits
# What the reference engine is checked against, and where.
_ORACLES: Final[dict[Family, str]] = {
    "esm2": "fair-esm and transformers (tests/golden/test_esm2.py, tests/golden/test_comparison.py)",
    "dnabert_s": "outputs of its authors' code and transformers' BertModel with ALiBi (tests/golden/test_dnabert_s.py, "
    "tests/golden/test_comparison.py)",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AskedModel:
    """One model as asked for; what is for both models is filled in.

    Attributes:
        family: architecture.
        name: catalogue name, hub name or path.
        repr_layer: layer to average; None is the last.
        precision: arithmetic.
        precision_flag: the flag that it came from, for messages.
        engine: "packed" or "reference".
        attention: attention backend.
        token_budget: most tokens in one packed batch; None is by model and device.
        switches: emergency switches of the environment.
    """

    family: Family
    name: str
    repr_layer: int | None
    precision: Precision
    precision_flag: str
    engine: Engine
    attention: AttentionChoice
    token_budget: int | None
    switches: tuple[str, ...]


def plan_models(
    config: RunConfig, devices: tuple[str, ...], existing: RunPlan | None
) -> tuple[PlannedModel, ...]:
    """The DNA model, then the protein model, as far as they are asked for; none of them compiled.

    Args:
        config: settings as asked for.
        devices: resolved devices, all of one kind; the models must fit each of them.
        existing: a plan to go on with, or to make one from; where no token budget is asked for, a model that
            is the same keeps its own.

    Raises:
        UsageError: no model is asked for, or settings contradict each other.
        CheckpointError: a model cannot be used.
        DeviceError: a device cannot compute in the precision asked for.
        DeviceMemoryError: a device has no room for a model.
    """
    asked = _asked_models(config)
    if not asked:
        raise UsageError("no model is given: name an ESM-2 or a DNABERT-S model.")
    if config.attention not in ("auto", "reference") and all(model.engine == "reference" for model in asked):
        raise UsageError(
            f"--engine reference has its own attention: leave out --attention {config.attention}."
        )
    if config.token_budget is not None and not 1 <= config.token_budget <= _MAX_TOKEN_BUDGET:
        raise UsageError(
            f"--token-budget {config.token_budget} cannot be used: give 1 to {_MAX_TOKEN_BUDGET} tokens."
        )
    for switch in switches_of(config):
        _log.warning("%s is set: it wins over what is asked for", switch)
    before = {model.family: model for model in existing.models} if existing is not None else {}
    return tuple(_plan_model(model, devices, before.get(model.family)) for model in asked)


def switches_of(config: RunConfig) -> tuple[str, ...]:
    """The emergency switches of a run: those that it came with, else those of this process."""
    return env().switches if config.switches is None else config.switches


def _asked_models(config: RunConfig) -> tuple[_AskedModel, ...]:
    """The models that are asked for, the DNA model with the settings that are for it alone."""
    asked = []
    if config.dnabert_model is not None:
        precision, flag = config.precision, "--precision"
        if config.dnabert_precision is not None:
            precision, flag = config.dnabert_precision, "--dnabert-precision"
        elif config.dnabert_engine == "reference":
            precision = "auto"  # what is asked for both models does not contradict what is for this one
        asked.append(
            _AskedModel(
                family="dnabert_s",
                name=config.dnabert_model,
                repr_layer=config.repr_layer if config.esm_model is None else None,
                precision=precision,
                precision_flag=flag,
                engine=config.dnabert_engine or config.engine,
                attention=config.attention,
                token_budget=config.token_budget,
                switches=switches_of(config),
            )
        )
    if config.esm_model is not None:
        asked.append(
            _AskedModel(
                family="esm2",
                name=config.esm_model,
                repr_layer=config.repr_layer,
                precision=config.precision,
                precision_flag="--precision",
                engine=config.engine,
                attention=config.attention,
                token_budget=config.token_budget,
                switches=switches_of(config),
            )
        )
    return tuple(asked)


def _plan_model(asked: _AskedModel, devices: tuple[str, ...], before: PlannedModel | None) -> PlannedModel:
    checkpoint = resolve_checkpoint(asked.name, asked.family)
    spec = read_spec(checkpoint)
    precision = _plan_precision(asked, devices)
    name = Path(asked.name).name if Path(asked.name).exists() else checkpoint.name
    if before is not None and before.location == str(checkpoint.location):
        name = before.name
    planned = PlannedModel(
        name=name,
        family=asked.family,
        spec=spec,
        repr_layer=validate_repr_layer(spec, asked.repr_layer),
        weights_fingerprint=weights_fingerprint(checkpoint),
        precision=precision,
        engine=asked.engine,
        attention=_plan_attention(asked, devices[0], precision, spec),
        compile_mode="none",
        token_budget=_REFERENCE_TOKEN_BUDGET,
        location=str(checkpoint.location),
    )
    return replace(planned, token_budget=_plan_token_budget(asked, planned, devices, before))


def _plan_precision(asked: _AskedModel, devices: tuple[str, ...]) -> ResolvedPrecision:
    choice = asked.precision
    if asked.engine == "reference":
        _log.info(
            "engine reference for %s: one sequence at a time in fp32, checked against %s",
            asked.name,
            _ORACLES[asked.family],
        )
        if choice not in ("auto", "fp32"):
            raise UsageError(
                f"--engine reference computes in fp32 only: leave out {asked.precision_flag} {choice}."
            )
        choice = "fp32"
    if {"VIRNUC_DISABLE_FP16", "VIRNUC_DISABLE_PACKING"} & {*asked.switches}:
        choice = "fp32"
    [precision] = {resolve_precision(choice, device) for device in devices}
    return precision


def _plan_attention(
    asked: _AskedModel, device: str, precision: ResolvedPrecision, spec: ModelSpec
) -> AttentionBackend:
    choice = asked.attention
    if asked.engine == "reference" or "VIRNUC_V1_ATTENTION" in asked.switches:
        choice = "reference"
    elif "VIRNUC_DISABLE_PACKING" in asked.switches:
        return "padded"
    elif "VIRNUC_DISABLE_FP16" in asked.switches and choice not in ("sdpa", "reference"):
        choice = "auto"  # what was asked for may be for 16 bit only
    return resolve_attention(choice, device, asked.family, precision, spec.head_dim)


def _plan_token_budget(
    asked: _AskedModel, planned: PlannedModel, devices: tuple[str, ...], before: PlannedModel | None
) -> int:
    if asked.engine == "reference":
        return _REFERENCE_TOKEN_BUDGET
    if asked.token_budget is not None:
        return asked.token_budget
    if before is not None and computes_alike(before, planned):
        return before.token_budget
    budget = default_token_budget(planned.spec, planned.precision, *devices)
    _log.info("token budget of %s in %s: %d (found automatically)", asked.name, planned.precision, budget)
    return budget


def computes_alike(before: PlannedModel, now: PlannedModel) -> bool:
    """Whether what was found to be best for one of two planned models is so for the other."""
    same = ("weights_fingerprint", "precision", "engine")
    return all(getattr(before, name) == getattr(now, name) for name in same)
