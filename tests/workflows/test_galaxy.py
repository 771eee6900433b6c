"""The Galaxy tool: Galaxy's linters, its command line, and its tests run by bash."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GALAXY = Path(__file__).parents[2] / "workflows" / "galaxy"
TOOL = GALAXY / "virnuc_predict.xml"
JOBS = Path(__file__).parent / "galaxy_jobs.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def galaxy(tool: Callable[[str], Path]) -> Callable[..., str]:
    python = tool("galaxy") / "python"

    def run(*arguments: str | Path, given: Any = None) -> str:
        done = subprocess.run(
            [python, JOBS, *arguments], input=json.dumps(given), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(
    "command", [("lint",), ("shed_lint", "--skip", "version_bumped")], ids=["lint", "shed_lint"]
)
def test_planemo_finds_nothing_to_warn_of(
    tool: Callable[[str], Path], tmp_path: Path, command: tuple[str, ...]
) -> None:
    # Whether the version was raised since the last upload is asked of the Tool Shed, over the network.
    done = subprocess.run(
        [tool("galaxy") / "planemo", *command, "--fail_level", "warn", GALAXY],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    assert "ERROR" not in done.stdout


def test_tests_of_the_tool_pass(galaxy: Callable[..., str], tmp_path: Path) -> None:
    cases = json.loads(galaxy("cases", TOOL))
    assert len(cases) == 2
    for number, case in enumerate(cases):
        folder = tmp_path / f"job {number}"
        folder.mkdir()
        dataset = case["parameters"]["input"]
        dataset |= {"name": dataset["path"], "path": str(GALAXY / "test-data" / dataset["path"])}
        _bash(galaxy("render", TOOL, given=case["parameters"]), folder)

        assert len(case["made"]) == case["count"]
        assert set(case["expected"]) == set(case["made"])
        for name, expectations in case["expected"].items():
            galaxy("verify", folder / case["made"][name], given=expectations)


def test_an_expectation_that_is_not_met_fails(
    tool: Callable[[str], Path], galaxy: Callable[..., str]
) -> None:
    expectations = json.loads(galaxy("cases", TOOL))[0]["expected"]["contigs"]
    done = subprocess.run(
        [tool("galaxy") / "python", JOBS, "verify", GALAXY / "test-data" / "contigs.fasta"],
        input=json.dumps(expectations),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Expected 5" in done.stderr


def test_published_models_take_the_head_of_the_history(galaxy: Callable[..., str], tmp_path: Path) -> None:
    parameters = json.loads(galaxy("cases", TOOL))[0]["parameters"]
    parameters["models"] = {
        "preset": "virnucpro-500",
        "head": _dataset(tmp_path / "dataset_2.dat", "zip", "500_model.pth"),
    }
    parameters["input"] = _dataset(tmp_path / "dataset_1.dat", "fasta", "it's $(touch harm); a sample.fa")
    command = galaxy("render", TOOL, given=parameters)
    folder = tmp_path / "job"
    folder.mkdir()
    record = tmp_path / "bin"
    record.mkdir()
    (record / "virnuc").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > arguments\ncat "$2" head.zip > read\n')
    (record / "virnuc").chmod(0o755)

    _bash(command, folder, record)
    arguments = (folder / "arguments").read_text().split("\n")
    assert arguments[:2] == ["predict", "input/it_s___touch_harm___a_sample.fa"]
    assert arguments[arguments.index("--preset") :][:4] == ["--preset", "virnucpro-500", "--head", "head.zip"]
    assert (folder / "read").read_text() == "it's $(touch harm); a sample.fa\n500_model.pth\n"
    assert not (folder / "harm").exists()


def _dataset(path: Path, extension: str, name: str) -> dict[str, str]:
    path.write_text(f"{name}\n")
    return {"class": "File", "path": str(path), "filetype": extension, "name": name}


def _bash(command: str, folder: Path, programs: Path = Path(sys.executable).parent) -> None:
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "GALAXY_SLOTS": "1"}
    environment.pop("VIRNUC_HOME")
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
