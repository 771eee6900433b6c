"""Where a command writes, looked at before any work is done for it."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from virnuc_core.errors import UsageError


def folder_of(out: Path) -> Path:
    """The folder of an output file.

    Raises:
        UsageError: it is not there, or no file can be made in it.
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


def require_no_input(out: Path, inputs: Iterable[str]) -> None:
    """Keeps an output from replacing what it is made from, by whatever path either is named.

    Raises:
        UsageError: `out` is one of the inputs.
    """
    for name in inputs:
        path = Path(name)
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(f"output {out} is the input {name}: choose another --out.")
