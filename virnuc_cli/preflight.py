"""Fast checks of models, inputs and outputs, before a command imports torch or starts Prefect."""

import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from virnuc_core.errors import InputError, UsageError, VirnucError
from virnuc_core.models.catalogue import require_head, require_known_model
from virnuc_core.remote import is_url
from virnuc_core.sequences.reader import STDIN
from virnuc_core.settings import PredictSettings, ReprocessSettings, RunConfig, predict_config


def require_models(settings: PredictSettings) -> None:
    """Fails early on invalid models, before the slow start of Prefect and the reading of inputs.

    Raises:
        VirnucError: there is no such model, no such head, or no head for these models.
    """
    config = predict_config(settings)
    require_known_models(config)
    require_head(config)


def require_known_models(settings: RunConfig | ReprocessSettings) -> None:
    """Fails early on an unknown model.

    Raises:
        CheckpointError: there is no model of that name.
    """
    if settings.dnabert_model is not None:
        require_known_model(settings.dnabert_model, "dnabert_s")
    if settings.esm_model is not None:
        require_known_model(settings.esm_model, "esm2")


@contextmanager
def readable(inputs: Sequence[str]) -> Iterator[list[str]]:
    """Makes the inputs re-readable: standard input is written to a file first.

    Raises:
        InputError: an input does not exist.
        UsageError: standard input is named twice.
    """
    require_inputs(inputs)
    if STDIN not in inputs:
        yield list(inputs)
        return
    if inputs.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read only once: name it once.")
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        spooled = Path(scratch) / "stdin"
        with open(spooled, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield [str(spooled) if name == STDIN else name for name in inputs]
        except VirnucError as error:
            # The user does not know the path of the copy, which is deleted by now.
            raise type(error)(str(error).replace(str(spooled), "standard input")) from error


def folder_of(out: Path) -> Path:
    """The folder of an output file.

    Raises:
        UsageError: it does not exist or is not writable.
    """
    folder = out.absolute().parent
    if not folder.is_dir() or out.is_dir():
        raise UsageError(f"--out {out} cannot be written: it must be a file in a folder that exists.")
    try:
        TemporaryDirectory(dir=folder, prefix=".virnuc-").cleanup()
    except OSError as error:
        raise UsageError(
            f"--out {out} cannot be written: {error.strerror}. Choose another folder."
        ) from error
    return folder


def require_inputs(names: Iterable[str]) -> None:
    """Checks all inputs before the first is read.

    Raises:
        InputError: one is missing, or a folder.
    """
    for name in itertools.filterfalse(is_url, names):
        if os.path.isdir(name):
            raise InputError(f"{name} is a folder. Name the files in it.")
        if name != STDIN and not os.path.exists(name):
            raise InputError(f"{name} does not exist. Check the path.")
