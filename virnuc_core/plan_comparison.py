"""What two plans differ in, in words, and what of one run can be taken over into another."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from virnuc_core.errors import MismatchError
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import Continuation, PlannedModel, RunPlan
from virnuc_core.specs import Family

# Fields that a flag of the same name sets, and those that one sets for the DNA model beside a protein model.
_FLAGGED: Final = (
    *("chunk_length", "min_length", "repr_layer", "precision", "engine", "attention"),
    *("compile_mode", "token_budget", "embeddings"),
)
_DNABERT_FLAGGED: Final = ("precision", "engine")
# What is chosen for a model by its arithmetic, where nothing is asked for.
_CHOSEN: Final = ("attention", "compile_mode", "token_budget")
_NOT_TO_BE_REPROCESSED: Final = frozenset({"kind", "input_digest", "chunk_length", "min_length", "rows"})
# The fields of a model that an emergency switch of the environment decides.
_SWITCHED: Final[Mapping[str, frozenset[str]]] = {
    "VIRNUC_DISABLE_FP16": frozenset({"precision", *_CHOSEN}),
    "VIRNUC_DISABLE_PACKING": frozenset({"precision", *_CHOSEN}),
    "VIRNUC_DISABLE_COMPILE": frozenset({"compile_mode"}),
    "VIRNUC_V1_ATTENTION": frozenset({"attention", "compile_mode"}),
}


def require_same_plan(existing: RunPlan, wanted: RunPlan, folder: RunFolder) -> None:
    """Refuses to go on with a run in a folder that was made with something else.

    What follows from an emergency switch that is set for one of the plans only may differ: see `continue_plan`.

    Args:
        existing: the plan in the folder, as it was made.
        wanted: the plan of what is asked for now.
        folder: the run's folder, for the message.

    Raises:
        MismatchError: they would give other numbers; names every such field and both values.
    """
    old, new = existing.decisive_values, wanted.decisive_values
    turned = {*existing.switches} ^ {*wanted.switches}
    switched = frozenset[str]().union(*(_SWITCHED.get(name, ()) for name in turned))
    differing = [
        key
        for key in {**old, **new}
        if old.get(key) != new.get(key) and key.partition(".")[2] not in switched
    ]
    if not differing:
        return
    named = _causes(differing) or ["shards"]
    described = "; ".join(_describe(key, existing, wanted, old.get(key), new.get(key)) for key in named)
    raise MismatchError(
        f"{folder.root} holds a run made with something else: {described}. The old settings are in "
        f"{folder.plan}. {_ways_out(existing, differing, folder)}"
    )


def continue_plan(existing: RunPlan, wanted: RunPlan, pending: Collection[int]) -> RunPlan:
    """The plan of a run whose missing shards compute as is asked for now, and the others as they did.

    Args:
        existing: the plan in the folder.
        wanted: the plan of what is asked for now, which `require_same_plan` accepts.
        pending: the shards that are missing.
    """
    now = Continuation(switches=wanted.switches, models=wanted.models, shards=tuple(sorted(pending)))
    parts = [
        replace(part, shards=tuple(shard for shard in part.shards if shard not in pending))
        for part in existing.continued
    ]
    merged = {_arithmetic(part.models): part for part in parts}
    if _arithmetic(now.models) != _arithmetic(existing.models):
        before = merged.get(_arithmetic(now.models), replace(now, shards=()))
        merged[_arithmetic(now.models)] = replace(before, shards=tuple(sorted({*before.shards, *now.shards})))
    costs = {shard: wanted.shards[shard].cost for shard in now.shards}
    return replace(
        existing,
        continued=tuple(part for part in merged.values() if part.shards),
        shards=tuple(replace(s, cost=costs.get(s.index, s.cost)) for s in existing.shards),
    )


def kept_families(old: RunPlan, new: RunPlan) -> frozenset[Family]:
    """The models whose vectors in the shards of one run are those that another run would compute."""
    common = ("kind", "input_digest", "chunk_length", "rows", "shards", "virnuc_version")
    before, now = old.decisive_values, new.decisive_values
    # Vectors that were rounded to be stored are not those that scores are computed from.
    if old.embeddings != "float32" or any(before[key] != now[key] for key in common):
        return frozenset()
    pairs = [(model, old.model(model.family)) for model in new.models]
    return frozenset(
        model.family
        for model, same in pairs
        if same is not None and model.decisive_values == same.decisive_values
    )


def _arithmetic(models: tuple[PlannedModel, ...]) -> str:
    """What decides the vectors of models, as one key."""
    return json.dumps([model.decisive_values for model in models], sort_keys=True)


def _causes(differing: list[str]) -> list[str]:
    """Those of these fields that the others do not follow from: all of them would bury the cause."""
    other_models = {key.partition(".")[0] for key in differing if key.endswith(".weights_fingerprint")}
    followers = {"shards"}
    for key in differing:
        family, _, name = key.partition(".")
        if name in ("precision", "engine"):
            followers |= {f"{family}.{chosen}" for chosen in _CHOSEN}
    causes = [key for key in differing if key.partition(".")[0] not in other_models and key not in followers]
    return causes + [f"{family}.weights_fingerprint" for family in sorted(other_models)]


def _ways_out(existing: RunPlan, differing: list[str], folder: RunFolder) -> str:
    if folder.previous is not None:
        return "Go on with the old setting, or throw away what was begun with it: --force."
    if existing.kind != "predict":
        return "Go on with the old setting, choose another --out, or start over with --force."
    if _NOT_TO_BE_REPROCESSED & set(differing) or differing == ["shards"]:
        return (
            "Go on with the old setting, choose another --out folder, or start over with --force. "
            "(`virnuc reprocess` moves a run to another model, head or setting, but not to other input, chunks or shards.)"
        )
    return (
        "Go on with the old setting, start over with --force, or move the run to the new setting with "
        f"`virnuc reprocess {folder.root}`, which keeps what both have in common."
    )


def _describe(key: str, existing: RunPlan, wanted: RunPlan, old: Any, new: Any) -> str:
    """One difference in words: the field, its flag, the value in the folder and the value asked for."""
    family, _, name = key.rpartition(".")
    if key == "input_digest":
        return f"input was {_input_names(existing)} ({old[:12]}), now {_input_names(wanted)} ({new[:12]})"
    if name == "weights_fingerprint":
        models = [plan.model("esm2" if family == "esm2" else "dnabert_s") for plan in (existing, wanted)]
        was, now = (f"{m.name} ({m.weights_fingerprint[:12]})" if m else "none" for m in models)
        return f"{family} model was {was}, now {now}"
    if key in ("head", "dna_head"):
        heads = (getattr(existing, key), getattr(wanted, key))
        was, now = (f"{head.name} ({head.fingerprint[:12]})" if head else "none" for head in heads)
        return f"{key} (--{key.replace('_', '-')}) was {was}, now {now}"
    if key == "rows":
        return f"rows (--dna-head) were of {old}, now of {new}"
    if key == "shards":
        return f"it was cut into {len(existing.shards)} shards (--shard-seconds), now {len(wanted.shards)}"
    if key == "min_length":
        old, new = existing.min_length, wanted.min_length
    is_one_of_two = family == "dnabert_s" and wanted.model("esm2") is not None
    prefix = "dnabert-" if is_one_of_two and name in _DNABERT_FLAGGED else ""
    flag = f" (--{prefix}{name.replace('_', '-')})" if name in _FLAGGED else ""
    return f"{key}{flag} was {old}, now {new}"


def _input_names(plan: RunPlan) -> str:
    names = [file.name for file in plan.inputs]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
