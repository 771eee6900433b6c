"""The Dockerfile and the SLURM examples: what they copy, run and ask for is there."""

import fnmatch
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import deployments
from virnuc_cli.main import cli

ROOT = Path(__file__).parents[3]
EXAMPLES = Path(deployments.__file__).parent / "examples" / "slurm"
JOBS = sorted(EXAMPLES.glob("*.sbatch"))
# Instructions with their continued lines in one; comments are left out.
LINES = re.sub(
    r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line.strip()]


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def test_every_instruction_is_known() -> None:
    known = {
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "ARG",
        "USER",
        "VOLUME",
        "ENTRYPOINT",
        "CMD",
        "STOPSIGNAL",
    }
    assert {name for name, _ in INSTRUCTIONS} == known


def test_bases_are_pinned_and_targets_are_there() -> None:
    stages: list[str] = []
    for line in arguments("FROM"):
        base, _, name = line.split()
        assert base in stages or re.fullmatch(r"python:3\.1[123]\.\d+-slim-bookworm", base)
        stages.append(name)
    assert {"cpu", "cuda"} <= set(stages)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in arguments("COPY"):
        words = shlex.split(line)
        if words[0].startswith("--from="):
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source
    assert {path for path in allowed if not (ROOT / path).exists()} == set()


def test_the_wheel_is_built_of_all_packages() -> None:
    copied = " ".join(arguments("COPY"))
    packages = ("virnuc_core", "tasks", "flows", "deployments", "virnuc_cli")
    assert all(name in copied for name in (*packages, "LICENSE"))


def test_both_targets_run_virnuc_without_rights() -> None:
    assert arguments("ENTRYPOINT") == ['["virnuc"]'] * 2
    assert arguments("USER") == ["virnuc"] * 2
    assert arguments("STOPSIGNAL") == ["SIGINT"]
    home = re.search(r"VIRNUC_HOME=(\S+)", " ".join(arguments("ENV")))
    assert home
    assert arguments("VOLUME") == [f'["{home[1]}"]'] * 2


@pytest.mark.parametrize("command", arguments("RUN"))
def test_commands_are_shell(command: str) -> None:
    subprocess.run(["/bin/sh", "-n", "-c", command], check=True)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_job_is_shell_and_runs_what_there_is(path: Path) -> None:
    text = path.read_text()
    subprocess.run(["/bin/bash", "-n", str(path)], check=True)
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    assert {"job-name", "gpus", "time", "output", "signal"} <= set(options)
    [command] = re.findall(r"^exec virnuc (.*)$", text, re.MULTILINE)
    name, *words = shlex.split(re.sub(r'"\$runs"', "4", command))
    assert cli.commands[name].make_context(name, words)


def test_there_is_a_job_for_each_way() -> None:
    assert [path.stem for path in JOBS] == ["predict", "worker"]
