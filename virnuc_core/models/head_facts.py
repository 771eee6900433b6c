"""What the file of a head says about itself, read without torch."""

from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from virnuc_core.errors import CheckpointError
from virnuc_core.files import parse_object

HEAD_FACTS: Final = "virnuc_head"  # entry of the file's metadata, JSON


def stated_chunk_length(path: Path) -> int | None:
    """Chunk length in bp that a head was trained for; None when its file does not say.

    Raises:
        CheckpointError: what the file says about itself cannot be read.
    """
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, framework="np") as file:
            facts = (file.metadata() or {}).get(HEAD_FACTS)
    except (SafetensorError, OSError):  # a damaged file, which whoever loads the tensors describes better
        return None
    try:
        chunk_length = None if facts is None else parse_object(facts).get("chunk_length")
        if chunk_length is not None and (type(chunk_length) is not int or chunk_length < 1):
            raise ValueError(f"its chunk length is {chunk_length!r:.40}")
    except ValueError as error:
        raise CheckpointError(
            f"{path} does not say properly what it was trained for: {error}. Make it again with virnuc train."
        ) from error
    return chunk_length
