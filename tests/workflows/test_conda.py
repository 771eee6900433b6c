"""The conda recipe: rendered by rattler-build, its requirements those of pyproject.toml, its test commands run."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "workflows" / "conda" / "recipe.yaml"
# Names that differ between the Python Package Index and conda-forge.
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal", "matplotlib": "matplotlib-base"}

_RENDER = """
import json, sys
from rattler_build import Stage0Recipe
[rendered] = Stage0Recipe.from_file(sys.argv[1]).render()
json.dump(rendered.recipe.to_dict(), sys.stdout)
"""


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="session")
def recipe() -> dict[str, Any]:
    return yaml.safe_load(RECIPE.read_text())


def test_requirements_are_those_of_the_project(project: dict[str, Any], recipe: dict[str, Any]) -> None:
    names_and_bounds = (
        re.fullmatch(r"([\w.-]+?)([<>=].*)", requirement) for requirement in project["dependencies"]
    )
    wanted = {f"{CONDA_NAMES.get(found[1], found[1])} {found[2]}" for found in names_and_bounds}
    python = f"python {project['requires-python']}"
    assert set(recipe["requirements"]["run"]) == wanted | {python, "__linux"}
    assert python in recipe["requirements"]["host"]


def test_build_and_description_are_those_of_the_project(
    project: dict[str, Any], recipe: dict[str, Any]
) -> None:
    [setuptools] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert setuptools.replace(">=", " >=") in recipe["requirements"]["host"]
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {function}" for name, function in project["scripts"].items()
    ]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    assert [recipe["about"]["license_file"]] == project["license-files"]


@pytest.mark.slow
def test_rattler_build_renders_it(tool: Callable[[str], Path], recipe: dict[str, Any]) -> None:
    command = [tool("conda") / "python", "-c", _RENDER, RECIPE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered = json.loads(done.stdout)
    assert rendered["package"] == {"name": "virnuc", "version": recipe["context"]["version"]}
    assert rendered["requirements"]["run"] == recipe["requirements"]["run"]
    assert rendered["build"]["noarch"] == "python"
    [source] = rendered["source"]
    assert (RECIPE.parent / source["path"]).resolve() == ROOT


@pytest.mark.slow
def test_commands_of_its_tests_succeed(recipe: dict[str, Any], tmp_path: Path) -> None:
    imports, commands = recipe["tests"]
    for file in commands["files"]["source"]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).symlink_to(ROOT / file)
    programs = Path(sys.executable).parent
    script = [f"python -c 'import {module}'" for module in imports["python"]["imports"]] + commands["script"]
    done = subprocess.run(
        ["bash", "-ec", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert recipe["context"]["version"] in done.stdout
    assert (tmp_path / "run" / "run.json").exists()
