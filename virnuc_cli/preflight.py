"""Checks of models, inputs and outputs that would fail only after torch is imported, or after other inputs are read."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from virnuc_core.errors import InputError, UsageError
from virnuc_core.files import is_stream
from virnuc_core.models.catalogue import chunks_of, require_known_model
from virnuc_core.remote import is_url
from virnuc_core.sequences.reader import STDIN, rereadable_stdin
from virnuc_core.settings import PredictSettings, predict_config


def require_models_and_head(settings: PredictSettings) -> None:
    """Raises VirnucError if there is no such model, no such head, or no head for these models."""
    config = predict_config(settings)
    require_models(config.esm_model, config.dnabert_model)
    chunks_of(config)  # asks the head


def require_models(esm_model: str | None, dnabert_model: str | None) -> None:
    """Raises CheckpointError if there is no model of that name; None is none to check."""
    if dnabert_model is not None:
        require_known_model(dnabert_model, "dnabert_s")
    if esm_model is not None:
        require_known_model(esm_model, "esm2")


@contextmanager
def readable(inputs: Sequence[str]) -> Iterator[None]:
    """Makes standard input re-readable; raises UsageError if it is named twice, and as `require_inputs`."""
    require_inputs(inputs)
    if inputs.count(STDIN) > 1:
        raise UsageError("standard input (-) can be read only once: give it once.")
    with rereadable_stdin() if STDIN in inputs else nullcontext():
        yield


def require_inputs(names: Iterable[str]) -> None:
    """Raises InputError if one is missing, or a folder."""
    for name in itertools.filterfalse(is_url, names):
        if os.path.isdir(name):
            raise InputError(f"{name} is a folder: give the files in it.")
        if name != STDIN and not os.path.exists(name):
            raise InputError(f"{name} does not exist: check the path.")


def require_writable(out: Path) -> None:
    """Raises UsageError if the folder of an output file does not exist or is not writable; a device needs none."""
    if is_stream(out):
        return
    folder = Path(os.path.realpath(out)).parent
    if not folder.is_dir() or out.is_dir():
        raise UsageError(f"--out {out} cannot be written: it must be a file in an existing folder.")
    try:
        TemporaryDirectory(dir=folder, prefix=".virnuc-").cleanup()
    except OSError as error:
        raise UsageError(
            f"--out {out} cannot be written: {error.strerror}. Choose another folder."
        ) from error
