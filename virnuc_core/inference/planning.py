"""From settings and a frame store to the plan of a run: every "auto" is decided here, once, and logged."""

import logging
from dataclasses import replace

from virnuc_core import __version__
from virnuc_core.errors import MismatchError, UsageError
from virnuc_core.inference.model_planning import computes_alike, plan_models, switches_of
from virnuc_core.inference.shard import pending_shards
from virnuc_core.inference.sharding import plan_shards, with_costs
from virnuc_core.inference.speed_warnings import speed_warnings
from virnuc_core.models.catalogue import BUNDLED_HEADS, dna_head_of, head_of, require_heads, resolve_head
from virnuc_core.models.classifier import classifier_fingerprint, load_classifier
from virnuc_core.models.compilation import resolve_compile_mode
from virnuc_core.plan_comparison import continue_plan, require_same_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import Kind, PlannedHead, PlannedModel, RunPlan, Shard, read_plan, write_plan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig
from virnuc_core.specs import ResolvedCompileMode
from virnuc_core.versions import log_version_warnings

_log = logging.getLogger(__name__)


def open_plan(
    config: RunConfig, store: FrameStore, kind: Kind, devices: tuple[str, ...], folder: RunFolder
) -> RunPlan:
    """The plan in a run's folder, made and written if there is none yet.

    A run that is made from another one has its shards, and for models that stay the same its choices. Of a run that is
    resumed with other emergency switches, the shards that are missing get the arithmetic that these leave.

    Args:
        config: settings as asked for.
        store: the frame store of the inputs.
        kind: what the run is to give.
        devices: resolved devices, all of one kind; token budgets fit each of them.
        folder: the run's folder.

    Raises:
        MismatchError: the folder holds a run made with something else.
        DamagedFileError: the plan in the folder cannot be read.
        VirnucError: a model, head or setting cannot be used.
    """
    log_version_warnings("compute")
    if not folder.plan.exists():
        previous = read_plan(folder.previous.plan) if folder.previous else None
        plan = make_plan(config, store, kind, devices, previous)
        write_plan(folder.plan, plan)
        return plan
    existing = read_plan(folder.plan)
    if existing.switches != switches_of(config):
        config = config.model_copy(
            update={"shard_seconds": None}
        )  # with other arithmetic, the same size has other bounds
    wanted = make_plan(config, store, kind, devices, existing)
    require_same_plan(existing.uniform, wanted, folder)
    if existing.threshold != wanted.threshold:
        existing = replace(existing, threshold=wanted.threshold)
        write_plan(folder.plan, existing)
    if not existing.continued and wanted.fingerprint == existing.fingerprint:
        return existing
    return _continue(existing, wanted, folder)


def _continue(existing: RunPlan, wanted: RunPlan, folder: RunFolder) -> RunPlan:
    """Has the missing shards computed with the switches that are set, and writes that into the plan."""
    pending = pending_shards(folder, existing)
    plan = continue_plan(existing, wanted, frozenset(pending))
    switches = ", ".join(wanted.switches) or "no switch"
    if not pending:
        _log.warning(
            "%s holds all of its shards: those that were computed with other switches of the environment than are set "
            "(%s) stay as they are. `virnuc reprocess` has all of them computed alike.",
            folder.root,
            switches,
        )
    elif plan.fingerprint != existing.fingerprint:
        write_plan(folder.plan, plan)
        _log.warning(
            "%s is resumed with other switches of the environment (%s): %d of %d shards are missing and compute with %s. "
            "The last digits of their scores may differ from those of the others; plan.json says which they are.",
            folder.root,
            switches,
            len(pending),
            len(plan.shards),
            "; ".join(f"{model.name} {model.arithmetic}" for model in wanted.models),
        )
    return plan


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
        existing: a plan to go on with, or to make this one from; where nothing is asked for, its shards are kept
            when it is for the same input, and its token budget and compile mode for a model that is the same.

    Raises:
        UsageError: settings contradict each other.
        CheckpointError: a model or the head cannot be used.
        MismatchError: the head was not trained with these models, or for this chunk length.
        DeviceError: the device cannot compute in the precision asked for.
    """
    models = plan_models(config, devices, existing)
    if kind != "predict" and config.embeddings == "none":
        raise UsageError("--embeddings none leaves nothing to write: choose float32 or float16.")
    head, dna_head = _plan_heads(config, models, existing) if kind == "predict" else (None, None)
    kept = existing if existing and existing.input_digest == store.meta.content_sha256 else None
    shards = _plan_shards(config, store, models, devices[0], kept)
    before = {model.family: model for model in existing.models} if existing is not None else {}
    seconds = sum(shard.cost for shard in shards)
    models = tuple(
        replace(model, compile_mode=_plan_compile_mode(config, model, seconds, before.get(model.family)))
        for model in models
    )
    plan = RunPlan(
        kind=kind,
        inputs=store.meta.inputs,
        input_digest=store.meta.content_sha256,
        chunk_length=config.chunk_length,
        rows=store.meta.rows,
        models=models,
        head=head,
        dna_head=dna_head,
        embeddings=config.embeddings,
        shards=shards,
        virnuc_version=__version__,
        warnings=speed_warnings(models, devices),
        switches=switches_of(config),
        min_length=store.meta.min_length,
        threshold=config.threshold,
    )
    for warning in plan.warnings:
        _log.warning("%s", warning)
    for model in plan.models:
        _log.info("plan: %s (%s): %s", model.name, model.family, model.arithmetic)
    _log.info("plan: %d rows in %d shards", store.num_frames, len(shards))
    return plan


def _plan_shards(
    config: RunConfig,
    store: FrameStore,
    models: tuple[PlannedModel, ...],
    device: str,
    existing: RunPlan | None,
) -> tuple[Shard, ...]:
    """The shards of a plan for the same input, unless a size is asked for."""
    if existing is not None and config.shard_seconds is None:
        return with_costs(existing.shards, store, models, device)
    return plan_shards(store, models, device, config.shard_seconds)


def _plan_compile_mode(
    config: RunConfig, model: PlannedModel, seconds: float, before: PlannedModel | None
) -> ResolvedCompileMode:
    """The mode asked for; "auto" keeps that of an earlier plan."""
    if "VIRNUC_DISABLE_COMPILE" in switches_of(config):
        return "none"
    if config.compile_mode == "auto" and before is not None and computes_alike(before, model):
        return before.compile_mode
    return resolve_compile_mode(config.compile_mode, model.attention, seconds)


def _plan_heads(
    config: RunConfig, models: tuple[PlannedModel, ...], existing: RunPlan | None
) -> tuple[PlannedHead, PlannedHead | None]:
    """The head for open frames, and the one for DNA alone if there is to be one."""
    require_heads(config)
    head = _plan_head(head_of(config), models, existing.head if existing else None)
    if (name := dna_head_of(config)) is None:
        return head, None
    return head, _plan_head(name, models[:1], existing.dna_head if existing else None)


def _plan_head(name: str, models: tuple[PlannedModel, ...], before: PlannedHead | None) -> PlannedHead:
    """A head, checked against the widths of the models whose vectors it takes."""
    path = resolve_head(name)
    widths = [model.spec.embedding_dim for model in models]
    if (expected := load_classifier(path).in_features) != sum(widths):
        given = " and ".join(
            f"{model.name} gives {width}" for model, width in zip(models, widths, strict=True)
        )
        flag = "--head" if len(models) > 1 else "--dna-head"
        raise MismatchError(
            f"head {name} takes {expected} features, but {given}. Give the {flag} that was trained with "
            f"{'these models' if len(models) > 1 else 'this model'}."
        )
    short_name = name if name in BUNDLED_HEADS else path.name
    if before is not None and before.location == str(path):
        short_name = before.name
    return PlannedHead(name=short_name, fingerprint=classifier_fingerprint(path), location=str(path))
