"""The one door to the model hub."""

import logging
from pathlib import Path
from typing import Final, cast

from virnuc_core.errors import CheckpointError
from virnuc_core.models.tensor_files import find_weight_files

_DESCRIPTIONS: Final = ("config.json", "tokenizer.json")
_ANSWER_WITHIN_S: Final = 20

logger = logging.getLogger(__name__)


def fetch(repo: str, revision: str | None) -> Path:
    """The folder of a repository in the hub's local cache, downloaded if it is not there.

    A pinned revision that is in the cache is used without asking the hub.

    Args:
        repo: OWNER/NAME.
        revision: 40-digit commit; None is the newest, or the newest in the cache when the hub is out of
            reach.

    Returns:
        The folder, named by its commit.

    Raises:
        CheckpointError: the repository cannot be reached or holds no weights; the message says how to
            fetch it on another machine.
    """
    if revision is not None and (folder := find_cached(repo, revision)):
        return folder
    try:
        return _download(repo, revision)
    except _hub_errors() as error:
        if revision is None and (folder := find_cached(repo, None)):
            logger.warning("the model hub cannot be reached; %s is taken from its cache, %s", repo, folder)
            return folder
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        at = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"{repo} cannot be fetched from the model hub ({reason}).\nOn a machine that reaches it, run\n"
            f"    hf download {repo}{at} --local-dir DIR\nthen give DIR as the model."
        ) from error


def hide_progress() -> None:
    """Keeps the hub's client from drawing bars."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()


def cache_folder() -> Path:
    """Where the hub's client keeps what it fetches."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def find_cached(repo: str, revision: str | None) -> Path | None:
    """The folder of a repository in the hub's local cache, if it is there and whole; the hub is not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Without patterns, a snapshot that was fetched in part on purpose would count as incomplete.
    patterns = list(_DESCRIPTIONS)
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True)
        return Path(folder) if find_weight_files(Path(folder)) else None
    except (LocalEntryNotFoundError, CheckpointError):
        return None


def _download(repo: str, revision: str | None) -> Path:
    """Fetches the descriptions and one form of the weights, safetensors where there are any."""
    from huggingface_hub import HfApi, snapshot_download

    # This request is not repeated on failure, so a machine without a network learns of it at once.
    info = HfApi().model_info(repo, revision=revision, timeout=_ANSWER_WITHIN_S)
    names = [file.rfilename for file in info.siblings or ()]
    weights = [name for name in names if name.startswith("model") and ".safetensors" in name]
    weights = weights or [name for name in names if name.startswith("pytorch_model") and ".bin" in name]
    if not weights:
        raise CheckpointError(
            f"{repo} on the model hub holds no model*.safetensors or pytorch_model*.bin. Give another one."
        )
    logger.info("fetching %s at %s from the model hub", repo, info.sha)
    return Path(snapshot_download(repo, revision=revision, allow_patterns=[*_DESCRIPTIONS, *weights]))


def _hub_errors() -> tuple[type[Exception], ...]:
    """What a failing request raises: the hub's own error is derived from that of its HTTP client."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, *cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__))
