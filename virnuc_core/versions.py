"""Versions of dependencies known to work, for `virnuc doctor` and the log."""

import logging
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

State = Literal["ok", "warning", "problem"]

_log = logging.getLogger(__name__)


def series(version: str) -> str:
    """The release series of a virnuc version, "0.1" for "0.1.7": all its releases give the same results."""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """Versions of one package known to work: from `since`, and before `before`, the first that fails or is untested.

    Attributes:
        package: name on PyPI; "python" is the interpreter.
        newer: state of versions from `before` on.
        why: the reason, for the message.
    """

    package: str
    part: Literal["compute", "orchestration"]
    since: str
    before: str
    newer: State = "warning"
    why: str = "not tested with others"
    is_optional: bool = False

    @property
    def range_text(self) -> str:
        """The range in words."""
        return f">={self.since},<{self.before}" if self.since != "0" else f"<{self.before}"


# For --attention flash-attn; its interface changes between betas.
FLASH_ATTN: Final = "flash-attn-4"
FLASH_ATTN_VERSION: Final = "4.0.0b36"

_TRITON: Final = "the kernels were tested with 3.6 and 3.7; each torch needs its own triton"
_BREAKS_THE_SERVER: Final = "newer versions keep the Prefect server from starting or from scheduling runs"
KNOWN_VERSIONS: Final = (
    KnownVersions("python", "compute", "3.11", "3.14"),
    KnownVersions("torch", "compute", "2.11", "2.14", why="tested with 2.11 on GPUs and with 2.13"),
    KnownVersions("numpy", "compute", "2.0", "3"),
    KnownVersions("triton", "compute", "3.6", "3.8", why=_TRITON, is_optional=True),
    KnownVersions(
        FLASH_ATTN,
        "compute",
        "4",
        "5",
        why=f"--attention flash-attn supports only {FLASH_ATTN_VERSION}",
        is_optional=True,
    ),
    KnownVersions("prefect", "orchestration", "3.8.8", "4"),
    KnownVersions("mlflow", "orchestration", "3.17", "4"),
    KnownVersions("fastapi", "orchestration", "0", "0.151", "problem", _BREAKS_THE_SERVER),
    KnownVersions("sqlalchemy", "orchestration", "0", "2.1", "problem", _BREAKS_THE_SERVER),
)

# Minimum driver by CUDA major version. Source: NVIDIA, "CUDA Compatibility", table 1.
OLDEST_DRIVER: Final = {12: 525, 13: 580}


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """An installed package checked against the table; `found` and `advice` may be empty."""

    package: str
    found: str
    state: State
    advice: str = ""


def check_versions(table: Iterable[KnownVersions] = KNOWN_VERSIONS) -> list[VersionCheck]:
    """Checks installed versions without importing the packages."""
    return [_check(known, installed_version(known.package)) for known in table]


def log_version_warnings(part: str) -> None:
    """Warns of installed versions not known to work."""
    for check in check_versions(known for known in KNOWN_VERSIONS if known.part == part):
        if check.state != "ok":
            found = f"{check.package} {check.found}".strip()
            _log.warning("%s: %s (see virnuc doctor)", found, check.advice)


def installed_version(package: str) -> str:
    """Version of a package or of "python"; "" when not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def triton_of_torch() -> str:
    """The Triton version that the installed torch requires; "" for none, as in CPU builds."""
    try:
        wanted = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return ""
    found = re.search(r"^triton==([\w.]+)", "\n".join(wanted).replace(" ", ""), re.MULTILINE)
    return found[1] if found else ""


def is_older(version: str, than: str) -> bool:
    """Whether a version precedes another; only the leading numbers count."""

    def numbers(text: str) -> list[int]:
        match = re.match(r"\d+(\.\d+)*", text)
        return [int(part) for part in re.sub(r"(\.0+)+$", "", match[0]).split(".")] if match else []

    return numbers(version) < numbers(than)


def _check(known: KnownVersions, found: str) -> VersionCheck:
    if not found and known.is_optional:
        return VersionCheck(known.package, found, "ok")
    if not found:
        advice = f"it is not installed: pip install '{known.package}>={known.since}'"
        return VersionCheck(known.package, found, "problem", advice)
    is_old = is_older(found, known.since)
    if not is_old and is_older(found, known.before):
        return VersionCheck(known.package, found, "ok")
    advice = f"known to work: {known.range_text} ({known.why})"
    return VersionCheck(known.package, found, "problem" if is_old else known.newer, advice)
