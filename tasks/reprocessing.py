"""The end of the move of a run to another one."""

from tasks.stage import stage
from virnuc_core.results.run_opening import put_in_place
from virnuc_core.run_folder import RunFolder


@stage
def move_to_next(folder: RunFolder) -> None:
    """Puts a run that is whole in the place of the one around it; the old one is gone then."""
    put_in_place(folder)
