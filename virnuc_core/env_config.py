"""The only reader of environment variables (`VARIABLES`); nothing is read on import."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from virnuc_core.errors import UsageError

_PREDECESSOR: Final = "VIRNUCPRO_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable, and the default when it is not set."""

    name: str
    meaning: str
    default: str


# Read where a run is requested and recorded with it; the environment of the workers is ignored.
SWITCHES: Final = (
    Variable("VIRNUC_DISABLE_FP16", "`1`: every model runs in fp32, whatever was asked for", "off"),
    Variable(
        "VIRNUC_DISABLE_PACKING",
        "`1`: fp32, and attention over padded batches of similar lengths, whatever was asked for; the other layers "
        "work token by token and skip the padding",
        "off",
    ),
    Variable("VIRNUC_DISABLE_COMPILE", "`1`: no layer is compiled, whatever was asked for", "off"),
    Variable(
        "VIRNUC_V1_ATTENTION",
        "`1`: plain fp32 attention, one sequence at a time, as `--attention reference`",
        "off",
    ),
)
VARIABLES: Final = (
    Variable("VIRNUC_HOME", "folder of the tracking database and of caches", "`~/.virnuc`"),
    *SWITCHES,
    Variable(
        "VIRNUC_THREADS",
        "CPU threads for all lanes together",
        "`OMP_NUM_THREADS`, else the cores this process may use",
    ),
    Variable(
        "VIRNUC_COMPILE_CACHE_GB",
        "most that compiled code may take in `VIRNUC_HOME`; what was used longest ago goes first, at the end of a lane",
        "5",
    ),
    Variable(
        "TORCHINDUCTOR_CACHE_DIR",
        "where torch keeps compiled code; a folder named here is not trimmed",
        "`compiled/inductor` in `VIRNUC_HOME`",
    ),
    Variable(
        "TRITON_CACHE_DIR",
        "where Triton keeps compiled code; a folder named here is not trimmed",
        "`compiled/triton` in `VIRNUC_HOME`",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "GPUs this process may use; each lane gets one", "all"),
    Variable("MLFLOW_TRACKING_URI", "where runs are logged", "SQLite in `VIRNUC_HOME`"),
    Variable("PREFECT_HOME", "where Prefect keeps its settings and database", "`prefect/` in `VIRNUC_HOME`"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """The parsed environment; None means not set.

    Attributes:
        home: folder for data that outlive a run.
        switches: names of the active `SWITCHES`.
        threads: CPU threads shared by all lanes.
    """

    home: Path
    switches: tuple[str, ...]
    compile_cache_gb: float
    inductor_cache: str | None
    triton_cache: str | None
    threads: int | None
    cuda_visible_devices: tuple[str, ...] | None
    tracking_uri: str | None
    prefect_home: str | None


@lru_cache(maxsize=1)
def env() -> EnvConfig:
    """The environment, cached on the first call.

    Raises:
        UsageError: a variable has an invalid value.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return EnvConfig(
        home=Path(os.environ.get("VIRNUC_HOME") or "~/.virnuc").expanduser(),
        switches=tuple(switch.name for switch in SWITCHES if _flag(switch.name)),
        compile_cache_gb=_amount("VIRNUC_COMPILE_CACHE_GB", 5.0),
        inductor_cache=os.environ.get("TORCHINDUCTOR_CACHE_DIR") or None,
        triton_cache=os.environ.get("TRITON_CACHE_DIR") or None,
        threads=_count("VIRNUC_THREADS") or _count("OMP_NUM_THREADS"),
        cuda_visible_devices=None if visible is None else tuple(filter(None, visible.split(","))),
        tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or None,
        prefect_home=os.environ.get("PREFECT_HOME") or None,
    )


def reload() -> EnvConfig:
    """Reads the environment again after this process has changed it; raises as `env`."""
    env.cache_clear()
    return env()


def physical_gpu(index: int) -> str:
    """Number or UUID on this machine of the GPU that is "cuda:INDEX" in this process."""
    visible = env().cuda_visible_devices
    return visible[index] if visible else str(index)


def available_threads() -> int:
    """CPU threads shared by all lanes of this process, at least 1."""
    if env().threads is not None:
        return env().threads or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def value_of(name: str) -> str | None:
    """The current value of one variable; None when not set."""
    return os.environ.get(name)


def names_with_prefix(prefix: str) -> list[str]:
    """Names of the variables that are set, sorted."""
    return sorted(name for name in os.environ if name.startswith(prefix))


def ignored_variables() -> list[str]:
    """One warning per VirNucPro variable that is set, naming virnuc's equivalent if there is one."""
    known = {variable.name for variable in VARIABLES}
    warnings = []
    for name in names_with_prefix(_PREDECESSOR):
        own = name.replace(_PREDECESSOR, "VIRNUC_", 1)
        instead = f"set {own}" if own in known else "docs/how-to/from-virnucpro.md says what to use"
        warnings.append(f"{name} is a variable of VirNucPro, and virnuc does not read it: {instead} instead.")
    return warnings


def user_config_folder() -> Path:
    """The user's settings folder, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "virnuc"


@contextmanager
def environment_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that are not set, for this block and its child processes; raises as `env`."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        reload()
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        env.cache_clear()


def child_environment() -> dict[str, str]:
    """A copy of the environment, to be modified for a child process."""
    return dict(os.environ)


def _flag(name: str) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise UsageError(f"environment variable {name} is {text!r}; set it to 1 or 0, or unset it.")


def _count(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(
        f"environment variable {name} is {text!r}; set it to a number of at least 1, or unset it."
    )


def _amount(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if 0 <= amount < math.inf:
        return amount
    raise UsageError(f"environment variable {name} is {text!r}; set it to a number from 0 on, or unset it.")
