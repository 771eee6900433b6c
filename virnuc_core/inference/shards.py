"""Which of a plan's shards are on the disk, and which are still to be computed."""

import hashlib
import logging
from collections.abc import Iterable, Iterator

from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.files import remove_temporaries
from virnuc_core.inference.plan import RunPlan, Shard, read_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.shard_file import ModelIdentity, ShardIdentity, ShardResult, read_shard, set_aside

_log = logging.getLogger(__name__)


def identity_of(plan: RunPlan, shard: Shard) -> ShardIdentity:
    """What the file of a shard must say."""
    plan = plan.for_shard(shard.index)
    return ShardIdentity(
        plan_fingerprint=plan.fingerprint,
        index=shard.index,
        begin=shard.begin,
        end=shard.end,
        models=tuple(
            ModelIdentity(
                name=model.name,
                family=model.family,
                weights_fingerprint=model.weights_fingerprint,
                num_layers=model.spec.num_layers,
                repr_layer=model.repr_layer,
                embedding_dim=model.spec.embedding_dim,
                precision=model.precision,
                token_budget=model.token_budget,
            )
            for model in plan.models
        ),
        head_fingerprint=plan.head.fingerprint if plan.head else "",
        embeddings=plan.embeddings,
        virnuc_version=plan.virnuc_version,
    )


def pending_shards(folder: RunFolder, plan: RunPlan) -> tuple[int, ...]:
    """The shards that are still to be computed, in order.

    Every shard on the disk is read and checked. One that is damaged or of another run is renamed, with a
    warning, and counts as not there.
    """
    pending = []
    for shard in plan.shards:
        path = folder.shard(shard.index)
        if not path.exists():
            pending.append(shard.index)
            continue
        try:
            read_shard(path, identity_of(plan, shard))
        except (DamagedFileError, MismatchError) as error:
            _log.warning("%s Set aside as %s; it is computed again.", error, set_aside(path).name)
            pending.append(shard.index)
    return tuple(pending)


class CommitGuard:
    """Keeps the shards of a lane out of a folder whose run was started over since the lane began.

    Args:
        folder: the run's folder.
        plan: the plan that the lane works on.
    """

    def __init__(self, folder: RunFolder, plan: RunPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._known = ""  # digest of the last plan.json that was found to be the lane's

    def require_wanted(self, shard: Shard) -> None:
        """Refuses a shard that the plan in the folder does not ask for.

        Raises:
            MismatchError: the folder has the plan of another run.
            DamagedFileError: its plan cannot be read.
            OSError: it has none.
        """
        digest = hashlib.sha256(self._folder.plan.read_bytes()).hexdigest()
        if digest == self._known:
            return
        current = read_plan(self._folder.plan)
        wanted = current.shards[shard.index : shard.index + 1]
        if [identity_of(current, one) for one in wanted] != [identity_of(self._plan, shard)]:
            raise MismatchError(
                f"{self._folder.root} was started over (--force) while this lane was at work for the run before it: its "
                f"shard {shard.index} is not written."
            )
        if current.fingerprint == self._plan.fingerprint:
            self._known = digest


def missing_shards(folder: RunFolder, indices: Iterable[int]) -> tuple[int, ...]:
    """Those of these shards that have no file.

    The folder is listed: asked for one file, a network file system may answer from memory that it is not there.
    """
    names = {path.name for path in folder.shards.iterdir()} if folder.shards.is_dir() else set()
    return tuple(index for index in indices if folder.shard(index).name not in names)


def remove_shard_temporaries(folder: RunFolder, indices: Iterable[int]) -> None:
    """Removes what killed lanes have left of shards that nobody computes now."""
    remove_temporaries(folder.shards, {folder.shard(index).name for index in indices})


def require_all_shards(folder: RunFolder, plan: RunPlan) -> None:
    """Refuses to go on unless every shard of the plan is on the disk and whole.

    Raises:
        DamagedFileError: a shard is missing or not whole.
        MismatchError: a shard is of another run.
    """
    for _ in iter_shard_results(folder, plan):
        pass


def iter_shard_results(folder: RunFolder, plan: RunPlan) -> Iterator[tuple[Shard, ShardResult]]:
    """Yields all shards in row order, each checked when it is read.

    Raises:
        DamagedFileError: a shard is missing or not whole.
        MismatchError: a shard is of another run.
    """
    for shard in plan.shards:
        path = folder.shard(shard.index)
        if not path.exists():
            raise DamagedFileError(
                f"shard {path} is missing: run the same command again, it computes what is missing."
            )
        yield shard, read_shard(path, identity_of(plan, shard))
