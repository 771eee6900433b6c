"""`tasks` and `flows` are common names: makes sure that those found are virnuc's own."""

from importlib.util import find_spec
from pathlib import Path

from virnuc_core.errors import UsageError

PACKAGES = ("virnuc_cli", "deployments", "flows", "tasks", "virnuc_core")


def require_one_folder() -> None:
    """Looks where the packages would be imported from, without importing them.

    Raises:
        UsageError: they do not lie side by side, so one of them belongs to another distribution.
    """
    folders = {name: _parent_folder(name) for name in PACKAGES}
    if len(set(folders.values())) > 1:
        found = ", ".join(f"{name} in {folder}" for name, folder in folders.items())
        raise UsageError(
            f"virnuc's packages are mixed up with those of another program: {found}. "
            "Install virnuc into an environment of its own."
        )


def _parent_folder(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.origin).parent.parent if spec and spec.origin else None
