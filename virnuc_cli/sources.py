"""Where settings come from: flags, then VIRNUC_* variables, then virnuc.toml in the working folder, then defaults.

A preset stands before the defaults: `virnuc_core.settings.predict_config`.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from virnuc_core.env_config import env, value_of, variable_set
from virnuc_core.errors import UsageError
from virnuc_core.files import require_utf8
from virnuc_core.settings import (
    EmbedSettings,
    FramesSettings,
    NightlySettings,
    PredictSettings,
    ProcessSettings,
    Settings,
    TrainSettings,
    faults_in_words,
)

FILE: Final = "virnuc.toml"
COMMANDS: Final = (
    *(PredictSettings, EmbedSettings, TrainSettings, FramesSettings, NightlySettings),
    ProcessSettings,
)

_Settings = TypeVar("_Settings", bound=Settings)


@contextmanager
def reading(kind: type[_Settings], flags: Mapping[str, Any]) -> Iterator[_Settings]:
    """Settings of a command, validated; in the block this process and its lanes have the threads that are asked for.

    Args:
        kind: model of the settings.
        flags: those that are given; `threads` may be among them.

    Raises:
        UsageError: a value, or a key of the file, cannot be used; names flag, variable or file and key. As `env`.
    """
    in_file = _read_file()
    names = [*ProcessSettings.model_fields, *kind.model_fields]
    variables = {name: text for name in names if (text := value_of(_variable(name)))}
    given = {name: value for name, value in {**in_file, **variables, **flags}.items() if name in names}
    process = {name: given.pop(name) for name in ProcessSettings.model_fields if name in given}

    def place(name: str) -> str:
        if name in variables and name not in flags:
            return f"environment variable {_variable(name)}"
        return f"{FILE}: {_key(name)}" if name in in_file and name not in flags else f"--{_key(name)}"

    try:
        threads, settings = ProcessSettings(**process).threads, kind(**given)
    except ValidationError as error:
        raise UsageError(faults_in_words(error, place)) from error
    env()
    require_utf8(*(value for _, value in settings if isinstance(value, str)))
    if threads is None:
        yield settings
    else:
        with variable_set(_variable("threads"), str(threads)):
            yield settings


def _read_file() -> dict[str, Any]:
    """The file's settings by name; it may hold those of all commands."""
    try:
        with open(FILE, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{FILE} cannot be read: {error.strerror}. Make it readable.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{FILE} is not TOML in UTF-8: {error}. Correct that place.") from error
    known = {name for kind in COMMANDS for name in kind.model_fields}
    named = {key.replace("-", "_"): value for key, value in values.items()}
    if len(named) < len(values):
        raise UsageError(f"{FILE}: a setting is given twice, with _ and with -. Leave out one.")
    for name in sorted(named.keys() - known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {_key(close[0])}?" if close else ". Keys are flags without dashes."
        raise UsageError(f"{FILE}: {_key(name)} is no setting{hint}")
    return named


def _variable(name: str) -> str:
    return f"VIRNUC_{name.upper()}"


def _key(name: str) -> str:
    return name.replace("_", "-")
