"""The plan of a run, from what is asked for."""

from tasks.stage import stage
from virnuc_core.inference.planning import open_plan
from virnuc_core.models.checkpoints import resolve_checkpoint
from virnuc_core.run_plan import Kind, RunFolder, RunPlan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import Family, RunConfig


def family_of(model: str) -> tuple[Family, str]:
    """Family and name that `esm2:NAME|PATH`, `dnabert:NAME|PATH` or a name or path alone stand for.

    Raises:
        CheckpointError: it has no prefix and cannot be recognised by its content.
    """
    prefix, _, name = model.partition(":")
    if prefix in ("esm2", "dnabert") and name:
        return ("esm2" if prefix == "esm2" else "dnabert_s"), name
    return resolve_checkpoint(model, None).family, model


@stage
def plan(folder: RunFolder, config: RunConfig, kind: Kind, devices: tuple[str, ...]) -> RunPlan:
    """Writes the plan, or makes sure that the one in the folder is of the same run.

    Raises:
        VirnucError: a model, the head or a setting cannot be used, or the folder holds another run.
    """
    return open_plan(config, FrameStore.open(folder.frames), kind, devices, folder)
