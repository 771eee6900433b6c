"""Where settings come from: flags, then VIRNUC_* variables, then virnuc.toml in the working folder, then defaults.

A preset stands before the defaults: `virnuc_core.settings.predict_config`.
"""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from virnuc_core.env_config import env, value_of, variable_set
from virnuc_core.errors import UsageError
from virnuc_core.files import require_utf8
from virnuc_core.settings import (
    EmbedSettings,
    FramesSettings,
    PredictSettings,
    ProcessSettings,
    Settings,
    TrainSettings,
    faults_in_words,
)

FILE: Final = "virnuc.toml"
COMMANDS: Final = (
    PredictSettings,
    EmbedSettings,
    TrainSettings,
    FramesSettings,
    ProcessSettings,
)

_Settings = TypeVar("_Settings", bound=Settings)


class _Sources(BaseSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _File(settings_cls, FILE)


class _File(TomlConfigSettingsSource):
    """The file may hold settings of all commands."""

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        try:
            values = super()._read_file(file_path)
        except OSError as error:
            raise UsageError(f"{FILE} cannot be read: {error.strerror}. Check its permissions.") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{FILE} is not valid TOML in UTF-8: {error}. Correct the file.") from error
        known = {name for kind in COMMANDS for name in kind.model_fields}
        named = {key.replace("-", "_"): value for key, value in values.items()}
        if len(named) < len(values):
            raise UsageError(f"{FILE}: a setting is given twice, with _ and with -. Remove one.")
        for name in sorted(named.keys() - known):
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"; did you mean {_key(close[0])}?"
                if close
                else ". Keys are flags without the leading dashes."
            )
            raise UsageError(f"{FILE}: unknown setting {_key(name)}{hint}")
        return named


@contextmanager
def reading(kind: type[_Settings], flags: Mapping[str, Any]) -> Iterator[_Settings]:
    """Settings of a command, validated; in the block this process and its lanes have the threads that are asked for.

    Args:
        kind: model of the settings.
        flags: those that are given; `threads` may be among them.

    Raises:
        UsageError: a value, or a key of the file, cannot be used; names flag, variable or file and key. As `env`.
    """
    config = SettingsConfigDict(
        env_prefix="VIRNUC_", env_ignore_empty=True, enable_decoding=False, extra="ignore"
    )
    sources = type(kind.__name__, (_Sources, ProcessSettings, kind), {"model_config": config})
    try:
        found = cast(ProcessSettings, sources(**flags))
    except ValidationError as error:
        in_file = _File(sources, FILE)()
        raise UsageError(faults_in_words(error, lambda name: _place(name, flags, in_file))) from error
    given = found.model_fields_set & kind.model_fields.keys()
    settings = kind(**{name: getattr(found, name) for name in given})
    env()
    require_utf8(*(value for _, value in settings if isinstance(value, str)))
    if found.threads is None:
        yield settings
    else:
        with variable_set("VIRNUC_THREADS", str(found.threads)):
            yield settings


def _place(name: str, flags: Mapping[str, Any], in_file: Mapping[str, Any]) -> str:
    """Where the value of a setting was given; its flag if nowhere."""
    if name not in flags and value_of(variable := f"VIRNUC_{name.upper()}"):
        return f"environment variable {variable}"
    return f"{FILE}: {_key(name)}" if name in in_file and name not in flags else f"--{_key(name)}"


def _key(name: str) -> str:
    return name.replace("_", "-")
