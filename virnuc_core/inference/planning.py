"""From settings and a frame store to the plan of a run: every "auto" is decided here, once, and logged."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from virnuc_core import __version__
from virnuc_core.env_config import env
from virnuc_core.errors import MismatchError, UsageError
from virnuc_core.inference.device import ResolvedPrecision, default_token_budget, resolve_precision
from virnuc_core.inference.sharding import plan_shards
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.catalogue import BUNDLED_HEADS
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.models.classifier import classifier_fingerprint, load_classifier, resolve_head
from virnuc_core.models.encoder import validate_repr_layer
from virnuc_core.models.weights import read_spec, weights_fingerprint
from virnuc_core.run_plan import (
    Kind,
    PlannedHead,
    PlannedModel,
    RunFolder,
    RunPlan,
    read_plan,
    require_same_plan,
    write_plan,
)
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import Family, ModelSpec, Precision, RunConfig

_REFERENCE_TOKEN_BUDGET: Final = 1  # every sequence is over it, so each one runs alone
_MAX_TOKEN_BUDGET: Final = 2**31 - 1  # more than any device holds; sums over batches stay within 64 bits

_log = logging.getLogger(__name__)


def open_plan(
    config: RunConfig, store: FrameStore, kind: Kind, devices: tuple[str, ...], folder: RunFolder
) -> RunPlan:
    """The plan in a run's folder, made and written if there is none yet.

    Args:
        config: settings as asked for.
        store: the frame store of the inputs.
        kind: what the run is to give.
        devices: resolved devices; the first one decides precision, token budgets and shard size.
        folder: the run's folder.

    Raises:
        MismatchError: the folder holds a run made with something else.
        DamagedFileError: the plan in the folder cannot be read.
        VirnucError: a model, head or setting cannot be used.
    """
    if not folder.plan.exists():
        plan = make_plan(config, store, kind, devices)
        write_plan(folder.plan, plan)
        return plan
    existing = read_plan(folder.plan)
    require_same_plan(existing, make_plan(config, store, kind, devices, existing), folder.root)
    return existing


def make_plan(
    config: RunConfig,
    store: FrameStore,
    kind: Kind,
    devices: tuple[str, ...],
    existing: RunPlan | None = None,
) -> RunPlan:
    """Decides everything that the numbers of a run depend on.

    Args:
        config: settings as asked for.
        store: the frame store of the inputs.
        kind: what the run is to give.
        devices: resolved devices.
        existing: a plan to go on with; where nothing was asked for, its token budgets are kept, and its
            shards when it is for the same input. Neither changes what a frame is given.

    Raises:
        UsageError: settings contradict each other.
        CheckpointError: a model or the head cannot be used.
        MismatchError: the head was not trained with these models.
        DeviceError: the device cannot compute in the precision asked for.
    """
    models = _plan_models(config, devices[0], existing)
    if not models:
        raise UsageError("no model is given: name an ESM-2 or a DNABERT-S model.")
    if kind == "embed" and config.embeddings == "none":
        raise UsageError("--embeddings none leaves nothing to write: choose float32 or float16.")
    precision = _plan_precision(config, devices[0])
    plan = RunPlan(
        kind=kind,
        inputs=store.meta.inputs,
        input_digest=store.meta.content_sha256,
        chunk_length=config.chunk_length,
        models=models,
        head=_plan_head(config, models) if kind == "predict" else None,
        precision=precision,
        engine=config.engine,
        attention=_plan_attention(config, devices[0]),
        embeddings=config.embeddings,
        shards=(),
        virnuc_version=__version__,
    )
    if existing is not None and existing.input_digest == plan.input_digest:
        shards = existing.shards
    else:
        shards = plan_shards(store, models, devices[0])
    _log.info(
        "plan: %s, %s engine, %s, %s attention, %d rows in %d shards",
        " and ".join(model.name for model in models),
        plan.engine,
        plan.precision,
        plan.attention,
        store.num_frames,
        len(shards),
    )
    return replace(plan, shards=shards)


def _plan_models(config: RunConfig, device: str, existing: RunPlan | None) -> tuple[PlannedModel, ...]:
    """The DNA model, then the protein model, as far as they are asked for."""
    asked: list[tuple[Family, str]] = []
    if config.dnabert_model is not None:
        asked.append(("dnabert_s", config.dnabert_model))
    if config.esm_model is not None:
        asked.append(("esm2", config.esm_model))
    planned = []
    for family, name in asked:
        repr_layer = config.repr_layer if family == "esm2" or len(asked) == 1 else None
        before = existing.model(family) if existing is not None else None
        planned.append(_plan_model(config, family, name, repr_layer, device, before))
    return tuple(planned)


def _plan_model(
    config: RunConfig,
    family: Family,
    name: str,
    repr_layer: int | None,
    device: str,
    before: PlannedModel | None,
) -> PlannedModel:
    checkpoint = resolve_checkpoint(name, family)
    spec = read_spec(checkpoint)
    return PlannedModel(
        name=Path(name).name if Path(name).exists() else checkpoint.name,
        family=family,
        spec=spec,
        repr_layer=validate_repr_layer(spec, repr_layer),
        weights_fingerprint=weights_fingerprint(checkpoint),
        token_budget=_plan_token_budget(config, spec, device, before),
        location=str(checkpoint.location),
    )


def _plan_token_budget(config: RunConfig, spec: ModelSpec, device: str, before: PlannedModel | None) -> int:
    asked = config.token_budget
    if asked is not None and not 1 <= asked <= _MAX_TOKEN_BUDGET:
        raise UsageError(f"--token-budget {asked} cannot be used: give 1 to {_MAX_TOKEN_BUDGET} tokens.")
    if config.engine == "reference":
        return _REFERENCE_TOKEN_BUDGET
    if asked is not None:
        return asked
    return before.token_budget if before is not None else default_token_budget(spec, device)


def _plan_precision(config: RunConfig, device: str) -> ResolvedPrecision:
    choice: Precision = config.precision
    if config.engine == "reference":
        if choice not in ("auto", "fp32"):
            raise UsageError(f"--engine reference computes in fp32 only: leave out --precision {choice}.")
        choice = "fp32"
    if env().disable_fp16 and choice != "fp32":
        _log.info("VIRNUC_DISABLE_FP16 is set: fp32 instead of %s", choice)
        choice = "fp32"
    return resolve_precision(choice, device)


def _plan_attention(config: RunConfig, device: str) -> str:
    choice = config.attention
    if config.engine == "reference":
        if choice not in ("auto", "reference"):
            raise UsageError(f"--engine reference has its own attention: leave out --attention {choice}.")
        choice = "reference"
    if env().v1_attention:
        choice = "reference"
    return resolve_attention(choice, device)


def _plan_head(config: RunConfig, models: tuple[PlannedModel, ...]) -> PlannedHead:
    """The head asked for, or the bundled one that was trained with the bundled models."""
    if len(models) != 2:
        raise UsageError("viral calls need both an ESM-2 and a DNABERT-S model: name both.")
    name = config.head
    if name is None:
        name = f"tiny-{config.chunk_length}"
        if name not in BUNDLED_HEADS or any(model.name != "tiny" for model in models):
            raise UsageError(
                f"no head is bundled for {models[0].name} and {models[1].name} at a chunk length of "
                f"{config.chunk_length}: give --head, or use both tiny models at 300 or 500."
            )
    path = resolve_head(name)
    width = sum(model.spec.embedding_dim for model in models)
    if (expected := load_classifier(path).in_features) != width:
        raise MismatchError(
            f"head {name} takes {expected} features, but {models[0].name} and {models[1].name} give {width} "
            f"({models[0].spec.embedding_dim} and {models[1].spec.embedding_dim}). Give the --head that was "
            "trained with these models."
        )
    short_name = name if name in BUNDLED_HEADS else path.name
    return PlannedHead(name=short_name, fingerprint=classifier_fingerprint(path), location=str(path))
