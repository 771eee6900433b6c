"""The plan of a run, from what is asked for."""

from tasks.stage import stage
from virnuc_core.inference.planning import open_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.run_plan import Kind, RunPlan
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig


@stage
def plan(folder: RunFolder, config: RunConfig, kind: Kind, devices: tuple[str, ...]) -> RunPlan:
    """Writes the plan, or makes sure that the one in the folder is of the same run.

    Raises:
        VirnucError: a model, the head or a setting cannot be used, or the folder holds another run.
    """
    return open_plan(config, FrameStore.open(folder.frames), kind, devices, folder)
