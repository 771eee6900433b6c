"""The only definition and reader of environment variables other than those of settings; nothing is read on import."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
)

from virnuc_core.errors import UsageError

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"  # when empty: no GPU; other empty variables are as if not set

_Switch = Annotated[bool, BeforeValidator(str.strip)]
_Folder = Annotated[Path, BeforeValidator(os.path.expanduser)]
_Names = Annotated[tuple[str, ...], BeforeValidator(lambda text: tuple(filter(None, text.split(","))))]


class EnvConfig(BaseModel):
    """The parsed environment: `staging` is VIRNUC_STAGING; None means not set.

    The switches are read where a run is requested and recorded with it; the environment of the workers is ignored.
    """

    model_config = ConfigDict(frozen=True, alias_generator=lambda name: f"VIRNUC_{name.upper()}")

    home_given: _Folder | None = Field(
        None,
        alias="VIRNUC_HOME",
        description="folder for the tracking database and caches; by default `~/.virnuc`",
    )
    staging: _Folder | None = Field(
        None,
        description="folder for copies of remote inputs and for runs whose results go to a URL; visible to all hosts in mode "
        "pool; by default `staging` in `VIRNUC_HOME`",
    )
    disable_fp16: _Switch = Field(False, description="`1`: run all models in fp32; overrides all settings")
    disable_packing: _Switch = Field(
        False, description="`1`: fp32, one sequence at a time; overrides all settings"
    )
    disable_compile: _Switch = Field(False, description="`1`: do not compile layers; overrides all settings")
    v1_attention: _Switch = Field(
        False, description="`1`: plain fp32 attention, one sequence at a time, as `--attention reference`"
    )
    threads: Annotated[int | None, Field(gt=0)] = Field(
        None,
        validation_alias=AliasChoices("VIRNUC_THREADS", "OMP_NUM_THREADS"),
        description="CPU threads shared by all lanes, as `--threads`; by default `OMP_NUM_THREADS`, else all available cores",
    )
    cuda_visible_devices: _Names | None = Field(
        None, alias=_VISIBLE, description="GPUs this process may use, one per lane; by default all"
    )
    lane_timeout: Annotated[FiniteFloat | None, Field(gt=0)] = Field(
        None,
        description="seconds without a finished shard after which a lane's process is killed; by default 20 times a shard's "
        "estimated work, at least 1800",
    )
    tracking_uri: str | None = Field(
        None,
        alias="MLFLOW_TRACKING_URI",
        description="where runs are logged; by default SQLite in `VIRNUC_HOME`",
    )
    tracking: Literal["on", "off"] = Field("on", description="`off`: runs are not logged in MLflow")
    prefect_home: str | None = Field(
        None,
        alias="PREFECT_HOME",
        description="where Prefect keeps its settings and database; by default `prefect/` in `VIRNUC_HOME`",
    )
    device_record: Path | None = Field(
        None,
        description="file that counts consecutive failed lanes on this device, set by `virnuc server worker`",
    )

    @property
    def home(self) -> Path:
        """Folder of the tracking database and of caches; raises UsageError if none is given and this account has none."""
        home = self.home_given or Path(os.path.expanduser("~/.virnuc"))
        if home.parts[:1] == ("~",):
            raise UsageError("this account has no home folder: set VIRNUC_HOME to a writable folder.")
        return home

    @property
    def switches(self) -> tuple[str, ...]:
        """Variables of the active switches."""
        fields = type(self).model_fields.items()
        return tuple(str(field.alias) for name, field in fields if getattr(self, name) is True)


@lru_cache(maxsize=1)
def env() -> EnvConfig:
    """The environment, cached on the first call.

    Raises:
        UsageError: a variable has an invalid value.
    """
    given = {name: text for name, text in os.environ.items() if text.strip() or name == _VISIBLE}
    try:
        return EnvConfig.model_validate(given)
    except ValidationError as error:
        fault = error.errors()[0]
        raise UsageError(
            f"environment variable {fault['loc'][0]} is {fault['input'].strip()!r}: {fault['msg']}. Correct or unset it."
        ) from error


def reload() -> EnvConfig:
    """Reads the environment again after this process has changed it; raises as `env`."""
    env.cache_clear()
    return env()


@contextmanager
def variable_set(name: str, text: str) -> Iterator[None]:
    """Sets a variable for this block and the processes that it starts."""
    before = os.environ.get(name)
    os.environ[name] = text
    env.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
        env.cache_clear()


def home_folder(name: str = "") -> Path:
    """VIRNUC_HOME, made for its owner alone unless it is there, or a folder in it, open to those that it is open to.

    Where they cannot be made, writing into them says why.
    """
    home = env().home.absolute()
    with suppress(OSError):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        (home / name).mkdir(mode=home.stat().st_mode, exist_ok=True)
    return home / name


def physical_gpu(index: int) -> str:
    """Number or UUID on this machine of the GPU that is "cuda:INDEX" in this process."""
    visible = env().cuda_visible_devices
    return visible[index] if visible else str(index)


def available_threads() -> int:
    """CPU threads shared by all lanes of this process, at least 1."""
    if (threads := env().threads) is not None:
        return threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def value_of(name: str) -> str | None:
    """The current value of one variable; None when not set."""
    return os.environ.get(name)


def ignored_variables() -> list[str]:
    """One warning per VirNucPro variable that is set, naming virnuc's equivalent if there is one."""
    known = {field.alias for field in EnvConfig.model_fields.values()}
    warnings = []
    for name in sorted(name for name in os.environ if name.startswith("VIRNUCPRO_")):
        own = name.replace("VIRNUCPRO_", "VIRNUC_", 1)
        instead = f"set {own}" if own in known else "use the flags of virnuc predict --help-all"
        warnings.append(f"{name} is a variable of VirNucPro, which virnuc ignores: {instead} instead.")
    return warnings


def child_environment() -> dict[str, str]:
    """A copy of the environment, to be modified for a child process."""
    return dict(os.environ)
