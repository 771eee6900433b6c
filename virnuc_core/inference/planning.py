"""Builds frame store and plan from sequence files and settings; resolves every "auto"."""

import hashlib
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from virnuc_core import __version__
from virnuc_core.env_config import env
from virnuc_core.errors import DamagedFileError, MismatchError, UsageError
from virnuc_core.files import file_digest
from virnuc_core.inference.device import default_token_budget, resolve_precision
from virnuc_core.inference.plan import (
    Kind,
    PlannedHead,
    PlannedModel,
    RunPlan,
    read_plan,
    require_same_plan,
    write_plan,
)
from virnuc_core.inference.sharding import plan_shards
from virnuc_core.models.attention import resolve_attention
from virnuc_core.models.catalogue import BUNDLED_HEADS, head_of, read_purpose, resolve_head
from virnuc_core.models.heads import load_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.models.kernels import MIN_CAPABILITY
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore, content_digest
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import input_digest
from virnuc_core.settings import RunConfig
from virnuc_core.specs import (
    Alphabet,
    ChunkRule,
    Engine,
    Family,
    FrameRule,
    InputFile,
    ResolvedPrecision,
)
from virnuc_core.versions import QUACK, QUACK_VERSION, installed_version, log_version_warnings

_IN_FP32: Final = frozenset({"VIRNUC_DISABLE_FP16", "VIRNUC_DISABLE_PACKING"})

_log = logging.getLogger(__name__)


def index_inputs(
    folder: RunFolder,
    inputs: list[str],
    chunk_length: ChunkRule | None,
    alphabet: Alphabet,
    frames: FrameRule = "open",
    min_length: int = 0,
) -> None:
    """Builds the frame store of a run, or reuses that of the same files and settings.

    Raises:
        InputError: a file cannot be read, or has nothing usable; rejected.tsv has the reasons.
        MismatchError: the folder holds a run with other files, chunks or frames.
    """
    has_plan = folder.plan.exists()
    if has_plan or folder.frames.exists():
        files = tuple(input_digest(path) for path in inputs)
        if has_plan:
            existing = read_plan(folder.plan)
            digests = [file.sha256 for file in files]
            is_same = digests == [file.sha256 for file in existing.inputs]
            # Other files have no store yet, whose digest this could be.
            digest = (
                existing.input_digest if is_same else hashlib.sha256("".join(digests).encode()).hexdigest()
            )
            wanted = replace(
                existing,
                inputs=files,
                input_digest=digest,
                chunk_length=chunk_length,
                frames=frames,
                min_length=min_length,
            )
            require_same_plan(existing, wanted, folder)
        if _is_store_of(folder.frames, files, (chunk_length, alphabet, frames, min_length)):
            return
    build_frame_store(
        inputs,
        folder.frames,
        chunk_length,
        alphabet,
        frames=frames,
        min_length=min_length,
        rejected_copy=folder.rejected,
    )


def _is_store_of(path: Path, files: tuple[InputFile, ...], settings: tuple[object, ...]) -> bool:
    if not path.exists():
        return False
    try:
        meta = FrameStore.open(path).meta
    except DamagedFileError as error:
        _log.warning("%s Rebuilding it.", error)
        return False
    if [file.sha256 for file in meta.inputs] != [file.sha256 for file in files]:
        return False
    if (meta.chunk_length, meta.alphabet, meta.frames, meta.min_length) != settings:
        return False
    if content_digest(path) != meta.content_sha256:
        _log.warning("frame store %s was modified: rebuilding it", path)
        return False
    return True


def open_plan(
    config: RunConfig,
    store: FrameStore,
    kind: Kind,
    devices: tuple[str, ...],
    folder: RunFolder,
    token: str | None = None,
    *,
    before: RunPlan | None = None,
) -> RunPlan:
    """Reads the plan of a run folder, creating it if missing.

    `devices` are resolved and all of one type. With a `token`, nothing is written once the run has been started over. `before`
    is an earlier plan of this process, whose token budgets are kept for the same models.

    Raises:
        HostError: the folder no longer has this token.
        MismatchError: the folder holds a run with other settings or emergency switches.
        DamagedFileError: the existing plan cannot be read.
        VirnucError: a model, head or setting cannot be used.
    """
    log_version_warnings()
    existing = read_plan(folder.plan) if folder.plan.exists() else None
    plan = make_plan(config, store, kind, devices, existing, before)
    if token is not None:
        folder.require_token(token)
    if existing is not None:
        require_same_plan(existing, plan, folder)
        plan = replace(existing, calls=plan.calls)
    if plan != existing:
        write_plan(folder.plan, plan)
    return plan


def make_plan(
    config: RunConfig,
    store: FrameStore,
    kind: Kind,
    devices: tuple[str, ...],
    existing: RunPlan | None = None,
    before: RunPlan | None = None,
) -> RunPlan:
    """Resolves everything that determines the results of a run.

    `existing` is a plan to resume: unless other values are requested, its shards are kept for the same input,
    and its token budget for the same model. Without it, the token budget is that of `before`.
    """
    models = plan_models(config, devices, existing or before, store.meta.frames)
    if kind != "predict" and config.embeddings == "none":
        raise UsageError("--embeddings none leaves nothing to write: choose float32 or float16.")
    head = None
    if kind == "predict":
        head = plan_head(head_of(config), models, store.meta.chunk_length, store.meta.frames)
    if existing and existing.input_digest == store.meta.content_sha256 and config.shard_seconds is None:
        shards = existing.shards
    else:
        shards = plan_shards(store, models, devices[0], config.shard_seconds)
    plan = RunPlan(
        kind=kind,
        inputs=store.meta.inputs,
        input_digest=store.meta.content_sha256,
        chunk_length=store.meta.chunk_length,
        frames=store.meta.frames,
        models=models,
        head=head,
        embeddings=config.embeddings,
        shards=shards,
        virnuc_version=__version__,
        warnings=_speed_warnings(models, devices),
        switches=switches_of(config),
        min_length=store.meta.min_length,
        calls=config.calls,
    )
    for warning in plan.warnings:
        _log.warning(warning)
    for model in plan.models:
        _log.info("plan: %s (%s): %s", model.name, model.family, model.arithmetic)
    _log.info("plan: %d rows in %d shards", store.num_frames, len(shards))
    return plan


def plan_models(
    config: RunConfig, devices: tuple[str, ...], existing: RunPlan | None, frames: FrameRule = "open"
) -> tuple[PlannedModel, ...]:
    """The requested models, DNA before protein, for these frames of chunks."""
    named: dict[Family, str | None] = {"dnabert_s": config.dnabert_model, "esm2": config.esm_model}
    asked = {family: name for family, name in named.items() if name is not None}
    if not asked:
        raise UsageError("no model is given: name an ESM-2 or a DNABERT-S model.")
    engines = {_engine_of(config, family) for family in asked}
    if config.attention not in ("auto", "reference") and engines == {"reference"}:
        raise UsageError(f"--engine reference uses its own attention: omit --attention {config.attention}.")
    if config.compile and engines == {"reference"}:
        raise UsageError("--engine reference does not use torch.compile: omit --compile.")
    for switch in switches_of(config):
        _log.warning("%s is set and overrides the settings", switch)
    return tuple(
        _plan_model(config, family, name, devices, existing.model(family) if existing else None, frames)
        for family, name in asked.items()
    )


def switches_of(config: RunConfig) -> tuple[str, ...]:
    """Emergency switches of a run: those of the configuration, else those of this process."""
    return env().switches if config.switches is None else config.switches


def _engine_of(config: RunConfig, family: Family) -> Engine:
    return (config.dnabert_engine if family == "dnabert_s" else None) or config.engine


def _plan_model(
    config: RunConfig,
    family: Family,
    asked: str,
    devices: tuple[str, ...],
    before: PlannedModel | None,
    frames: FrameRule,
) -> PlannedModel:
    checkpoint = open_checkpoint(asked, family)
    spec, engine, switches = checkpoint.spec, _engine_of(config, family), switches_of(config)
    precision = _plan_precision(config, family, asked, devices, frames)
    attention = config.attention
    if engine == "reference" or "VIRNUC_V1_ATTENTION" in switches:
        attention = "reference"
    elif not _IN_FP32.isdisjoint(switches) and attention not in ("sdpa", "reference"):
        attention = "auto"  # the requested backend may be 16-bit only
    name = Path(asked).name if Path(asked).exists() else checkpoint.name
    if before is not None and before.location == str(checkpoint.location):
        name = before.name
    if precision == "fp8" and config.compile:
        raise UsageError("fp8 does not use torch.compile: omit --compile.")
    is_for_this_model = family == "esm2" or config.esm_model is None
    repr_layer, last = config.repr_layer if is_for_this_model else None, spec.num_layers
    if repr_layer is not None and not 0 <= repr_layer <= last:
        raise UsageError(
            f"layer {repr_layer} does not exist: this {family} model has {last} layers; choose 0 "
            f"(embeddings) to {last} (last layer)"
        )
    planned = PlannedModel(
        name=name,
        family=family,
        spec=spec,
        repr_layer=last if repr_layer is None else repr_layer,
        weights_fingerprint=checkpoint.fingerprint,
        precision=precision,
        engine=engine,
        attention=resolve_attention(attention, devices[0], family, precision, spec.head_dim),
        compiled=config.compile and engine == "packed" and "VIRNUC_DISABLE_COMPILE" not in switches,
        token_budget=1,  # below any sequence, so that each one runs alone
        location=str(checkpoint.location),
    )
    if engine == "reference" or "VIRNUC_DISABLE_PACKING" in switches:
        return planned
    if config.token_budget is not None:
        return replace(planned, token_budget=config.token_budget)
    same = ("weights_fingerprint", "precision", "engine")
    if before is not None and all(getattr(before, name) == getattr(planned, name) for name in same):
        return replace(planned, token_budget=before.token_budget)
    budget = default_token_budget(spec, precision, *devices)
    _log.info("token budget of %s in %s: %d (auto)", name, precision, budget)
    return replace(planned, token_budget=budget)


def _plan_precision(
    config: RunConfig, family: Family, asked: str, devices: tuple[str, ...], frames: FrameRule
) -> ResolvedPrecision:
    choice, flag = config.precision, "--precision"
    if family == "dnabert_s" and config.dnabert_precision is not None:
        choice, flag = config.dnabert_precision, "--dnabert-precision"
    elif family == "dnabert_s" and config.dnabert_engine == "reference":
        choice = "auto"  # --precision for both models does not contradict --dnabert-engine
    if _engine_of(config, family) == "reference":
        _log.info("engine reference for %s: one sequence at a time in fp32", asked)
        if choice not in ("auto", "fp32"):
            raise UsageError(f"--engine reference computes only in fp32: omit {flag} {choice}.")
        choice = "fp32"
    if not _IN_FP32.isdisjoint(switches_of(config)):
        choice = "fp32"
    [precision] = {resolve_precision(choice, device, frames) for device in devices}
    if choice == "auto":
        _log.info("precision of %s: %s (auto)", asked, precision)
    return precision


def plan_head(
    name: str, models: tuple[PlannedModel, ...], chunk_length: ChunkRule | None, frames: FrameRule
) -> PlannedHead:
    """A head by name or path, which takes the vectors of these models."""
    path = resolve_head(name, chunk_length, frames)
    head, widths = load_head(path), tuple(model.spec.embedding_dim for model in models)
    if not head.fits(widths):
        given = " and ".join(
            f"{model.name} gives {width}" for model, width in zip(models, widths, strict=True)
        )
        raise MismatchError(
            f"head {name} takes {head.takes}, but {given}. Use the --head trained on these models."
        )
    short_name = name if name in BUNDLED_HEADS else path.name
    return PlannedHead(
        name=short_name,
        fingerprint=file_digest(path),
        location=str(path),
        calibrated=read_purpose(path).calibrated,
    )


def _speed_warnings(models: tuple[PlannedModel, ...], devices: tuple[str, ...]) -> tuple[str, ...]:
    if devices[0] == "cpu" or all(model.precision == "fp32" for model in models):
        return ()
    reasons = [] if find_spec("triton") else ["Triton is not installed"]
    for device in devices:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < MIN_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            reasons.append(f"{device} ({name}) has compute capability {major}.{minor}, below 8.0")
    if reasons:
        slow = "virnuc's kernels cannot run, and plain torch is several times slower. See `virnuc doctor`."
        return (f"{reasons[0]}: {slow}",)
    is_hopper = any(torch.cuda.get_device_capability(device)[0] == 9 for device in devices)
    if is_hopper and installed_version(QUACK) != QUACK_VERSION:
        return (f"{QUACK} {QUACK_VERSION} is not installed: products take longer. pip install 'virnuc[gpu]'",)
    return ()
