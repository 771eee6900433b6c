"""The outputs in docs/tutorial.md, from running its commands.

Blocks marked `bash` and `python` run in order in a folder that holds `examples/`; a following `text` block is their output.
Other blocks are not run. A test runs the same and compares.
"""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from scripts.render.tables import ROOT
from virnuc_cli.main import main as virnuc

PAGE: Final = ROOT / "docs" / "tutorial.md"

_BLOCK: Final = re.compile(r"^```(?P<mark>\w+)\n(?P<body>.*?)^```\n", re.DOTALL | re.MULTILINE)
# Output that varies between machines and runs.
_VOLATILE: Final = (
    (re.compile(r"[\d,.]+ (sequences|residues)/s"), r"N \1/s"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "HASH"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A block that is run: "bash" or "python", and the expected output, if any, with its position in the page."""

    mark: str
    body: str
    shown: str | None = None
    place: tuple[int, int] = (0, 0)


def steps(text: str) -> Iterator[Step]:
    blocks = list(_BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block["mark"] in ("bash", "python"):
            step = Step(mark=block["mark"], body=block["body"])
            if after is not None and after["mark"] == "text":
                step = replace(step, shown=after["body"], place=after.span("body"))
            yield step


def run(step: Step, names: dict[str, Any]) -> str:
    """Runs one block in the current folder and returns its stdout; `names` holds the variables of earlier Python blocks.

    Raises:
        RuntimeError: a command failed.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if step.mark == "python":
            exec(compile(step.body, str(PAGE), "exec"), names)  # noqa: S102 - it is a page of this repository
        else:
            for command in _commands(step.body):
                _run_command(command)
    return printed.getvalue()


def stable(text: str) -> str:
    for pattern, instead in _VOLATILE:
        text = pattern.sub(instead, text)
    return text


def _commands(body: str) -> Iterator[str]:
    """The commands of a block: its lines, with here-documents in one piece."""
    command = ""
    for line in body.splitlines():
        command += line
        if "<<END" in command and line != "END":
            command += "\n"
            continue
        yield command
        command = ""


def _run_command(command: str) -> None:
    """Runs virnuc in this process, which has loaded its imports, and anything else in a shell."""
    program, *arguments = shlex.split(command) if "\n" not in command else [""]
    if program == "virnuc":
        if code := virnuc(arguments):
            raise RuntimeError(f"{command} ended with exit code {code}")
        return
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} ended with exit code {done.returncode}: {done.stderr}")
    print(done.stdout, end="")


@contextlib.contextmanager
def in_folder_with_examples() -> Iterator[Path]:
    """Changes to a temporary folder with the files of a clone that the page uses."""
    with tempfile.TemporaryDirectory(prefix="virnuc-tutorial-") as folder:
        shutil.copytree(ROOT / "examples", Path(folder, "examples"))
        with contextlib.chdir(folder):
            yield Path(folder)


def render(text: str) -> str:
    """Runs all blocks and returns the page with their current output."""
    names: dict[str, Any] = {}
    shift = 0
    with in_folder_with_examples():
        for step in list(steps(text)):
            printed = run(step, names)
            print(step.body + printed)
            if step.shown is not None and stable(printed) != stable(step.shown):
                begin, end = (position + shift for position in step.place)
                text = text[:begin] + printed + text[end:]
                shift += len(printed) - (end - begin)
    return text
