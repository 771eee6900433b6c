"""The versions of other programs that virnuc is known to work with: one table for `virnuc doctor` and for the log."""

import logging
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

Part = Literal["compute", "orchestration"]
State = Literal["ok", "warning", "problem"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownVersions:
    """The versions of one package that work.

    Attributes:
        package: its name at the package index; "python" is the interpreter.
        part: what it is for: computing, or running flows and recording them.
        since: the first that works.
        before: the first that does not, or that nobody has tried.
        newer: what a version from there on is.
        why: what is known of older or newer ones.
        is_optional: whether virnuc does without.
    """

    package: str
    part: Part
    since: str
    before: str
    newer: Literal["warning", "problem"] = "warning"
    why: str = "not tested with others"
    is_optional: bool = False

    @property
    def in_words(self) -> str:
        """The versions for a person."""
        return f"from {self.since} and before {self.before}" if self.since != "0" else f"before {self.before}"


# For --attention flash-attn: a beta, whose interface changes from one to the next.
FLASH_ATTN: Final = "flash-attn-4"
FLASH_ATTN_VERSION: Final = "4.0.0b36"

_BREAKS_THE_SERVER: Final = "with newer ones the Prefect server does not start, or schedules no runs"
KNOWN_VERSIONS: Final = (
    KnownVersions(package="python", part="compute", since="3.11", before="3.14"),
    KnownVersions(
        package="torch",
        part="compute",
        since="2.11",
        before="2.14",
        why="tested with 2.11 on GPUs and with 2.13",
    ),
    KnownVersions(package="numpy", part="compute", since="2.0", before="3"),
    KnownVersions(
        package="triton",
        part="compute",
        since="3.6",
        before="3.8",
        why="the kernels were run with 3.6 and 3.7; each torch wants a triton of its own",
        is_optional=True,
    ),
    KnownVersions(
        package=FLASH_ATTN,
        part="compute",
        since="4",
        before="5",
        why=f"--attention flash-attn takes {FLASH_ATTN_VERSION} only",
        is_optional=True,
    ),
    KnownVersions(package="prefect", part="orchestration", since="3.8.8", before="4"),
    KnownVersions(package="mlflow", part="orchestration", since="3.17", before="4"),
    KnownVersions(
        package="fastapi",
        part="orchestration",
        since="0",
        before="0.151",
        newer="problem",
        why=_BREAKS_THE_SERVER,
    ),
    KnownVersions(
        package="sqlalchemy",
        part="orchestration",
        since="0",
        before="2.1",
        newer="problem",
        why=_BREAKS_THE_SERVER,
    ),
)

# The oldest driver for programs made with CUDA of this major version. Source: NVIDIA, "CUDA Compatibility", table 1.
OLDEST_DRIVER: Final = {12: 525, 13: 580}


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionCheck:
    """One installed package against the table.

    Attributes:
        package: its name.
        found: the installed version; empty when there is none.
        state: what that means.
        advice: what to do; empty when it is fine.
    """

    package: str
    found: str
    state: State
    advice: str = ""


def check_versions(table: Iterable[KnownVersions] = KNOWN_VERSIONS) -> list[VersionCheck]:
    """Looks at what is installed, without importing it."""
    return [_check(known, installed_version(known.package)) for known in table]


def log_version_warnings(part: Part) -> None:
    """Warns of installed versions that are not known to work."""
    for check in check_versions(known for known in KNOWN_VERSIONS if known.part == part):
        if check.state != "ok":
            found = f"{check.package} {check.found}".strip()
            _log.warning("%s: %s (virnuc doctor says more)", found, check.advice)


def installed_version(package: str) -> str:
    """The version of a package, "" when it is not installed; that of the interpreter for "python"."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def triton_of_torch() -> str:
    """The triton that the installed torch was made for; "" when it asks for none, as builds for the CPU do."""
    try:
        wanted = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return ""
    found = [match for line in wanted if (match := re.match(r"triton==([\w.]+)", line.replace(" ", "")))]
    return found[0][1] if found else ""


def is_older(version: str, than: str) -> bool:
    """Whether a version comes before another; what follows the numbers does not count."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _check(known: KnownVersions, found: str) -> VersionCheck:
    if not found:
        state: State = "ok" if known.is_optional else "problem"
        advice = (
            "" if known.is_optional else f"it is not installed: pip install '{known.package}>={known.since}'"
        )
        return VersionCheck(package=known.package, found=found, state=state, advice=advice)
    if is_older(found, known.since):
        state = "problem"
    elif not is_older(found, known.before):
        state = known.newer
    else:
        return VersionCheck(package=known.package, found=found, state="ok")
    advice = f"known to work: {known.in_words} ({known.why}). Install with -c constraints.txt"
    return VersionCheck(package=known.package, found=found, state=state, advice=advice)
