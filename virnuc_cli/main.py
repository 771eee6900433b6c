"""The command line `virnuc`.

Exit codes: 0 done, 1 unexpected, 2 usage or configuration, 3 input, 4 a run folder or a checkpoint does not
match or is damaged, 5 device, memory or lane, 6 a disk or a folder, 130 interrupted. An error is one message on stderr;
`--debug` adds the traceback. Results go to stdout, progress and warnings to stderr. With `--json`, stdout holds exactly
one JSON object, also for errors.

Slow imports wait until a command needs them, so that `virnuc --help` is fast.
"""

import atexit
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TextIO

import click

from virnuc_cli import models, server  # noqa: F401 (they add their commands)
from virnuc_cli.commands import cli
from virnuc_core.errors import UsageError, VirnucError, storage_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["cli", "main", "run_and_exit"]

PACKAGES: Final = ("virnuc_cli", "deployments", "flows", "tasks", "virnuc_core")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; `argv` excludes the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # No child takes a module from the working folder, which may hold data of others.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        require_one_folder()
        result = cli.main(args=arguments, prog_name="virnuc", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _report(error.format_message(), error.exit_code, arguments)
    except VirnucError as error:
        return _report(str(error), error.exit_code, arguments)
    except OSError as error:
        translated = storage_error(error)
        return _report(str(translated), translated.exit_code, arguments)
    except (KeyboardInterrupt, click.Abort):
        message = "interrupted: repeat the command to resume"
        return _report(message, 130, arguments)
    except Exception as error:  # noqa: BLE001 - the outermost handler: one line and an exit code
        found = f"unexpected {type(error).__name__}: {error}"
        return _report(f"{found}. Run again with --debug and report the traceback.", 1, arguments)


def run_and_exit() -> NoReturn:
    """`main` as a process, which ends without freeing every object: with torch that takes most of a second."""
    sys.stdout, sys.stderr = _outliving_readers(sys.stdout), _outliving_readers(sys.stderr)
    exit_code = main()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.exit(exit_code)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(exit_code)


class _Output(io.FileIO):
    """A file descriptor for output; when who reads it has gone, what is written is dropped."""

    def write(self, data: "Buffer", /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return super().write(data)


def _outliving_readers(stream: TextIO) -> TextIO:
    """The stream, without errors when its reader ends first, as with `virnuc ... | head`; None if it is closed, as in sys."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(
        raw,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def require_one_folder() -> None:
    """Checks that the packages are virnuc's own, since `tasks` and `flows` are common names; imports none of them.

    Raises:
        UsageError: they are not side by side, so one belongs to another distribution.
    """
    specs = {name: find_spec(name) for name in PACKAGES}
    folders = {
        name: Path(spec.origin).parent.parent if spec and spec.origin else None
        for name, spec in specs.items()
    }
    if len(set(folders.values())) > 1:
        found = ", ".join(f"{name} in {folder}" for name, folder in folders.items())
        raise UsageError(
            f"virnuc's packages are mixed with those of another program: {found}. "
            "Install virnuc into a separate environment."
        )


def _report(message: str, exit_code: int, arguments: list[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"virnuc: error: {message}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"error": message, "exit_code": exit_code}))
    return exit_code
