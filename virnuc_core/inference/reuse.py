"""Vectors that a derived run reuses because it would compute identical bytes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference.plan import RunPlan, Shard, read_plan, reused_families
from virnuc_core.inference.shard import ModelCounters, read_shard, shard_identity
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import Family

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusedVectors:
    """One model's vectors of a shard: fp32 (n, D) on the host, in row order, and the work they took."""

    vectors: Tensor
    counters: ModelCounters


class ReusedShards:
    """Shards of the run that another one is derived from; `families` are the models reused in at least one shard."""

    def __init__(self, folder: RunFolder, old: RunPlan, new: RunPlan) -> None:
        uniform = [plan for plan, _ in old.grouped(shard.index for shard in old.shards)]
        self._families = {plan.fingerprint: reused_families(plan, new) for plan in uniform}
        self.families: Final = frozenset[Family]().union(*self._families.values())
        self._folder = folder
        self._old = old
        self._new = new

    @classmethod
    def open(cls, folder: RunFolder, plan: RunPlan) -> Self | None:
        """The reusable shards for the run in a folder; None if there are none.

        Raises:
            DamagedFileError: the plan of the earlier run cannot be read.
        """
        if folder.previous is None:
            return None
        reused = cls(folder.previous, read_plan(folder.previous.plan), plan)
        return reused if reused.families else None

    def read(self, shard: Shard) -> Mapping[Family, ReusedVectors]:
        """Reusable vectors of one shard; empty if its old file is missing or corrupt."""
        families = self._families.get(self._old.for_shard(shard.index).fingerprint, frozenset[Family]())
        if not families:
            return {}
        identity = shard_identity(self._old, self._old.shards[shard.index])
        try:
            result = read_shard(self._folder.shard(shard.index), identity)
        except (DamagedFileError, MismatchError) as error:
            _log.warning("nothing can be kept of shard %d, all of it is computed: %s", shard.index, error)
            return {}
        arrays = {"dnabert_s": result.dna, "esm2": result.protein}
        found: dict[Family, ReusedVectors] = {}
        for counters in result.counters.models:
            family = counters.family
            model, vectors = self._new.model(family), arrays[family]
            if family in families and model is not None and vectors is not None:
                found[family] = ReusedVectors(
                    vectors=torch.from_numpy(vectors),
                    counters=replace(counters, name=model.name),
                )
        return found
