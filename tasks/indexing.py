"""The frame store of a run, from its sequence files."""

from tasks.stage import stage
from virnuc_core.inference.planning import index_inputs
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import StoreMeta
from virnuc_core.specs import Alphabet, Rows


@stage
def index(
    folder: RunFolder,
    inputs: list[str],
    chunk_length: int | None,
    alphabet: Alphabet,
    rows: Rows = "open_frames",
    min_length: int = 0,
) -> StoreMeta:
    """Builds the frame store, or keeps the one of the same files and settings.

    Raises:
        InputError: a file cannot be read, or nothing in it can be used; rejected.tsv says why.
        MismatchError: the folder holds a run over other files or chunks.
    """
    return index_inputs(folder, inputs, chunk_length, alphabet, rows, min_length)
