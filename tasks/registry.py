"""Heads of the MLflow model registry, `models:/NAME@ALIAS` or `models:/NAME/VERSION`, as files in the staging folder."""

import logging
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

from tasks.mlflow_store import download_version, find_version
from virnuc_core.errors import CheckpointError, StorageLostError, UsageError
from virnuc_core.files import atomic_path
from virnuc_core.inference.plan import RunPlan, read_plan
from virnuc_core.models.catalogue import is_registered
from virnuc_core.models.classifier import classifier_fingerprint
from virnuc_core.remote import staging_folder
from virnuc_core.settings import ReprocessSettings, RunConfig

_REFERENCE: Final = re.compile(r"models:/((?!\.)[^/:@]+)(?:@([^/:@]+)|/([0-9]+))")

Config = TypeVar("Config", RunConfig, ReprocessSettings)

_log = logging.getLogger(__name__)


def with_registered_head(config: Config, before: Path | None) -> Config:
    """Replaces a head of the registry by its path.

    Args:
        config: settings of a run.
        before: plan.json of an earlier attempt, if it exists: an alias means the version of that plan.

    Raises:
        CheckpointError: there is no such head, or it is no safetensors file, or not as it was registered.
        StorageLostError: MLflow cannot be reached, or the file arrived damaged.
        UsageError: the name of a head is malformed.
    """
    if not is_registered(config.head):
        return config
    planned = read_plan(before) if before is not None and before.exists() else None
    local: Config = config.model_copy(update={"head": str(registered_head(config.head, planned))})
    return local


def registered_head(reference: str, planned: RunPlan | None = None) -> Path:
    """The file of a head of the registry, downloaded unless it is there; otherwise as `with_registered_head`."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise UsageError(f"{reference} names no head: give models:/NAME@ALIAS or models:/NAME/VERSION.")
    name, alias, version = match.groups()
    folder = staging_folder() / "heads" / name
    if planned and planned.head and alias:
        path = Path(planned.head.location)
        if path.parent.parent == folder:
            _log.info("%s is version %s, with which this run was planned", reference, path.parent.name)
            if _is_whole(path, planned.head.fingerprint):
                return path
            alias, version = None, path.parent.name
    version, tags = find_version(name, alias, version)
    path = folder / version / f"{name}-v{version}.safetensors"
    expected = tags.get("sha256")
    if not _is_whole(path, expected):
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(name, version, path)
    if not _is_whole(path, expected):
        path.unlink()
        raise StorageLostError(
            f"version {version} of {name} has another SHA-256 than when it was registered: try again, or register it anew."
        )
    return path


def _is_whole(path: Path, sha256: str | None) -> bool:
    """Whether a head is there with this digest; None for any."""
    return path.exists() and sha256 in (None, classifier_fingerprint(path))


def _download(name: str, version: str, path: Path) -> None:
    with TemporaryDirectory(prefix=".", dir=path.parent) as scratch:
        download_version(name, version, Path(scratch))
        found = list(Path(scratch).rglob("*.safetensors"))
        if len(found) != 1:
            raise CheckpointError(
                f"version {version} of {name} in the MLflow registry holds {len(found)} safetensors files, and a head is "
                "one: virnuc reads no pickled models. Register it with `virnuc train`."
            )
        with atomic_path(path, shared=True) as temporary:
            found[0].rename(temporary)
    _log.info("version %s of %s was copied from the MLflow registry to %s", version, name, path)
