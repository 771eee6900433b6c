"""What a run prints when its worker is there, and when it is not any more."""

import os
import subprocess
import sys
from pathlib import Path

from deployments.engine import unbreakable

ROOT = Path(__file__).parents[3]


def test_text_arrives(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding="utf-8") as file:
        print("Zeile ä", file=unbreakable(file))
    assert path.read_text(encoding="utf-8") == "Zeile ä\n"


def test_printing_goes_on_when_nobody_reads() -> None:
    script = """
import sys
from rich.console import Console
from deployments.engine import unbreakable
sys.stdout = unbreakable(sys.stdout)
sys.stdin.readline()  # until nobody reads
for _ in range(3):
    Console(file=sys.stdout).print("a line of Prefect's log")
    print("a line")
"""
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=writer
    ) as process:
        os.close(writer)
        os.close(reader)
        process.communicate(b"go\n", timeout=60)
    assert process.returncode == 0


def test_prefect_would_end_the_run_then() -> None:
    """Otherwise this module is not needed."""
    script = """
import sys
from rich.console import Console
sys.stdin.readline()
Console(file=sys.stdout).print("a line of Prefect's log")
"""
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.DEVNULL
    ) as process:
        os.close(writer)
        os.close(reader)
        process.communicate(b"go\n", timeout=60)
    assert process.returncode == 1
