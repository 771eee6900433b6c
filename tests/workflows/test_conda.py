"""The conda recipe: rendered by rattler-build, its requirements those of pyproject.toml, its test commands run."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.workflows.conftest import ROOT, Run, Tool

RECIPE = ROOT / "workflows" / "conda" / "recipe.yaml"
# Names that differ between the Python Package Index and conda-forge.
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal", "matplotlib": "matplotlib-base"}
RENDER = """
import json, sys
from rattler_build import Stage0Recipe
[rendered] = Stage0Recipe.from_file(sys.argv[1]).render()
json.dump(rendered.recipe.to_dict(), sys.stdout)
"""


def test_it_says_what_the_project_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load(RECIPE.read_text())
    found = (re.fullmatch(r"([\w.-]+?)([<>=].*)", requirement) for requirement in project["dependencies"])
    wanted = {f"{CONDA_NAMES.get(one[1], one[1])} {one[2]}" for one in found if one}
    assert set(recipe["requirements"]["run"]) == wanted | {f"python {project['requires-python']}", "__linux"}
    entries = [f"{name} = {function}" for name, function in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == entries
    assert recipe["about"]["summary"] == project["description"]


@pytest.mark.slow
def test_rattler_build_renders_it_and_its_commands_succeed(tool: Tool, run: Run, tmp_path: Path) -> None:
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    done = run(tool("conda") / "python", "-c", RENDER, RECIPE)
    assert done.returncode == 0, done.stderr
    rendered = json.loads(done.stdout)
    assert rendered["package"] == {"name": "virnuc", "version": recipe["context"]["version"]}
    assert (RECIPE.parent / rendered["source"][0]["path"]).resolve() == ROOT

    imports, commands = recipe["tests"]
    for file in commands["files"]["source"]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).symlink_to(ROOT / file)
    script = [f"python -c 'import {module}'" for module in imports["python"]["imports"]] + commands["script"]
    done = run("bash", "-ec", "\n".join(script))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "run.json").exists()
