"""Versions of dependencies known to work, for `virnuc doctor` and the log."""

import logging
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Final, Literal

from packaging.specifiers import SpecifierSet

State = Literal["ok", "warning", "problem"]

_log = logging.getLogger(__name__)


def series(version: str) -> str:
    """The release series of a virnuc version, "0.1" for "0.1.7": all its releases give the same results."""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """Versions of a PyPI package that are known to work, such as ">=2,<3", and what others are."""

    package: str
    works: str
    other: State = "warning"
    why: str = "not tested with others"
    is_optional: bool = False

    def check(self) -> tuple[State, str, str]:
        """State, installed version and advice; the latter two may be empty. Does not import the package."""
        found = installed_version(self.package)
        if not found:
            advice = f"it is not installed: pip install '{self.package}{self.works}'"
            return ("ok", "", "") if self.is_optional else ("problem", "", advice)
        if SpecifierSet(self.works, prereleases=True).contains(found):
            return "ok", found, ""
        return self.other, found, f"known to work: {self.works} ({self.why})"


# For --attention flash-attn; its interface changes between betas.
FLASH_ATTN: Final = "flash-attn-4"
FLASH_ATTN_VERSION: Final = "4.0.0b36"
# Matrix products on Hopper GPUs; virnuc extends its classes.
QUACK: Final = "quack-kernels"
QUACK_VERSION: Final = "0.6.5"

_BREAKS_THE_SERVER: Final = "newer versions keep the Prefect server from starting or from scheduling runs"
KNOWN_VERSIONS: Final = (
    KnownVersions("torch", ">=2.11,<2.14", why="tested with 2.11 on GPUs and with 2.13"),
    KnownVersions("numpy", ">=2.0,<3"),
    KnownVersions(
        "triton",
        ">=3.6,<3.8",
        why="the kernels were tested with 3.6 and 3.7; each torch needs its own triton",
        is_optional=True,
    ),
    KnownVersions(
        FLASH_ATTN, f"=={FLASH_ATTN_VERSION}", why="its interface changes between betas", is_optional=True
    ),
    KnownVersions(QUACK, f"=={QUACK_VERSION}", why="virnuc extends its classes", is_optional=True),
    KnownVersions("prefect", ">=3.8.8,<4"),
    KnownVersions("mlflow", ">=3.17,<4"),
    KnownVersions("fastapi", "<0.151", "problem", _BREAKS_THE_SERVER),
    KnownVersions("sqlalchemy", "<2.1", "problem", _BREAKS_THE_SERVER),
)

# Minimum driver by CUDA major version. Source: NVIDIA, "CUDA Compatibility", table 1.
OLDEST_DRIVER: Final = {12: 525, 13: 580}


@cache
def log_version_warnings() -> None:
    """Warns of installed versions not known to work, once in a process."""
    for known in KNOWN_VERSIONS:
        state, found, advice = known.check()
        if state != "ok":
            _log.warning("%s: %s (see virnuc doctor)", f"{known.package} {found}".strip(), advice)


def installed_version(package: str) -> str:
    """Version of a package; "" when not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def triton_of_torch() -> str:
    """The Triton version that the installed torch requires; "" for none, as in CPU builds."""
    wanted = metadata.requires("torch") or []
    found = re.search(r"^triton==([\w.]+)", "\n".join(wanted).replace(" ", ""), re.MULTILINE)
    return found[1] if found else ""
