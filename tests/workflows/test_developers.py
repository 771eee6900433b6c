"""What developers work with: pre-commit, the CI workflow, releases, the citation, the development container."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from virnuc_core import __version__

ROOT = Path(__file__).parents[2]
CI = ROOT / ".github" / "workflows" / "ci.yml"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if ":: 3." in name]
NEXT = "9.8.7"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("vendor.github-workflows", CI),
        ("custom.github-workflows-require-timeout", CI),
        ("vendor.citation-file-format", ROOT / "CITATION.cff"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_files_are_as_their_schemas_want_them(schema: str, path: Path) -> None:
    done = _run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, path], ROOT)
    assert done.returncode == 0, done.stdout


def test_ci_runs_what_a_change_must_pass_with_no_more_rights_than_to_read() -> None:
    workflow = yaml.safe_load(CI.read_text())
    jobs = workflow["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in jobs.values())
    assert jobs["test"]["strategy"]["matrix"]["python"] == PYTHONS
    assert {step["run"] for step in steps if "run" in step} == {".ci/run", "make docs", "make dist"}
    assert _is_a_target("docs")
    assert _is_a_target("dist")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_actions_are_pinned_to_commits() -> None:
    used = re.findall(r"uses: (.*)", CI.read_text())
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_citation_is_that_of_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"] == PROJECT["name"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["authors"] == PROJECT["authors"]
    dois = re.findall(
        r'<citation type="doi">(.*)</citation>', (ROOT / "workflows/galaxy/macros.xml").read_text()
    )
    assert {reference["doi"] for reference in citation["references"]} == set(dois)


def test_development_container_installs_what_the_makefile_runs() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    image = re.fullmatch(r"mcr\.microsoft\.com/devcontainers/python:(3\.\d+)-bookworm", container["image"])
    program, *targets = container["postCreateCommand"].split()
    assert image
    assert image[1] in PYTHONS
    assert program == "make"
    assert targets
    assert all(_is_a_target(target) for target in targets)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a repository of one commit from the files of this tree, with this environment as its `.venv`."""
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith("installed"):
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / "installed-dev").touch()
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "All files"]):
        assert _run(["git", *command], folder).returncode == 0
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pre_commit_runs_make_check(tool: Callable[[str], Path], checkout: Path, tmp_path: Path) -> None:
    program = tool("pre-commit") / "pre-commit"
    environment = {"PRE_COMMIT_HOME": str(tmp_path)}
    assert _run([program, "validate-config"], checkout).returncode == 0

    done = _run([program, "run", "--all-files"], checkout, environment)
    assert done.returncode == 0, done.stdout
    assert "Passed" in done.stdout

    (checkout / "scripts" / "unformatted.py").write_text("'''A module.'''\nx = [1,2]\n")
    done = _run([program, "run", "--all-files"], checkout, environment)
    (checkout / "scripts" / "unformatted.py").unlink()
    assert done.returncode == 1
    assert "scripts/unformatted.py" in done.stdout
    assert "1 file would be reformatted" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_release_is_refused_until_all_agrees_and_then_built_and_tagged(checkout: Path) -> None:
    def release(version: str = NEXT) -> "subprocess.CompletedProcess[str]":
        return _run(["make", "release", f"VERSION={version}"], checkout)

    def commit(path: str, old: str, new: str) -> None:
        text = (checkout / path).read_text()
        assert old in text
        (checkout / path).write_text(text.replace(old, new))
        assert _run(["git", "commit", "--quiet", "--all", "--message", path], checkout).returncode == 0

    assert "is not a version" in release("1.0").stderr
    assert f"__version__ is {__version__}" in release().stderr
    (checkout / "left").touch()
    assert "the working tree has changes" in release().stderr
    (checkout / "left").unlink()
    commit("virnuc_core/__init__.py", f'"{__version__}"', f'"{NEXT}"')
    assert "CHANGELOG.md begins with" in release().stderr
    heading = re.search("^## .*", (checkout / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    commit("CHANGELOG.md", heading[0], f"## {NEXT}")
    assert "test_every_stated_version" in release().stdout
    assert _run(["git", "tag"], checkout).stdout == ""

    stated = [
        "git",
        "grep",
        "--files-with-matches",
        "--fixed-strings",
        __version__,
        "--",
        "CITATION.cff",
        "workflows",
    ]
    for path in _run(stated, checkout).stdout.split():
        commit(path, __version__, NEXT)
    done = release()
    if "No matching distribution" in done.stdout + done.stderr:
        pytest.skip("the build backend cannot be installed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _run(["git", "describe", "--exact-match"], checkout).stdout == f"v{NEXT}\n"
    assert {path.name for path in (checkout / "dist").iterdir()} == {
        f"virnuc-{NEXT}-py3-none-any.whl",
        f"virnuc-{NEXT}.tar.gz",
    }
    assert "the tag v9.8.7 exists" in release().stderr


def _is_a_target(name: str) -> bool:
    return _run(["make", "--dry-run", name], ROOT).returncode == 0


def _run(
    command: list[str | Path], folder: Path, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    person = {"NAME": "A Developer", "EMAIL": "developer@example.org"}
    git = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in person.items()}
    variables = {**os.environ, **git, "GIT_CONFIG_GLOBAL": os.devnull, **(environment or {})}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
