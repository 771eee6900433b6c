"""The module and the example pipeline: linted and parsed; run by Nextflow where it can be had, else block by block."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tests.workflows.example_contigs import names_in, write_contigs
from virnuc_core import __version__

NEXTFLOW = Path(__file__).parents[2] / "workflows/nextflow"
MODULE = NEXTFLOW / "modules/nf-core/virnuc/predict"
PROCESS = (MODULE / "main.nf").read_text()

# What `nf-core modules lint` asks Nextflow and the network for, neither of which `_nf_core_offline` has.
NOT_TO_BE_HAD = {"docker_tag", "singularity_tag", "bioconda_version"}

# Checks of each file of the module: a lint that stopped early would not have them.
MUST_PASS = {
    "container_links",
    "correct_meta_inputs",
    "correct_meta_outputs",
    "correct_meta_topics",
    "environment_yml_sorted",
    "main_nf_version_topic",
    "test_main_tags",
    "test_stub_gzip_syntax",
}

# Answers only what nf-core asks before it lints. `nextflow inspect`, which resolves the names of containers, fails.
NEXTFLOW_OF_NF_CORE = """#!/bin/sh
case $1 in -v) echo 'nextflow version 26.10.3';; config) echo '{}';; *) exit 1;; esac
"""

PARSE = """
import json, sys
from reftrace import ConfigFile, Module
files = [(Module if name.endswith(".nf") else ConfigFile).from_file(name) for name in sys.argv[1:]]
print(json.dumps([[type(file).__name__, str(file)] for file in files]))
"""


@pytest.fixture
def tools(tool: Callable[[str], Path]) -> Path:
    return tool("nextflow")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """This virnuc on the PATH, and a home folder of the test's own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "HOME": str(tmp_path / "home"), "NXF_ANSI_LOG": "false"}


def _block(name: str) -> str:
    """Returns the shell template of a block of the process, `script` or `stub`, as it is written."""
    return PROCESS.split(f"    {name}:\n")[1].split('"""')[1]


def _interpolate(template: str, variables: Mapping[str, object]) -> str:
    """Does what Groovy does with a string in double quotes: escapes, `$name.key` and `${name.key}`."""
    name = r"\w+(?:\.\w+)*"

    def replace(match: re.Match[str]) -> str:
        escaped, braced, plain = match.groups()
        return escaped or str(variables[braced or plain])

    return re.sub(rf"\\(.)|\$\{{({name})\}}|\$({name})", replace, template, flags=re.DOTALL)


def _outputs(prefix: str) -> list[str]:
    """Returns the files that the process promises."""
    return [_interpolate(path, {"prefix": prefix}) for path in re.findall(r'path\("(.+?)"\)', PROCESS)]


def _run(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _run_block(name: str, variables: Mapping[str, object], folder: Path, environment: dict[str, str]) -> None:
    script = _interpolate(_block(name), variables)
    done = _run(["bash", "-C", "-e", "-u", "-o", "pipefail", "-c", script], folder, environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_script_block_writes_what_the_process_promises(tmp_path: Path, environment: dict[str, str]) -> None:
    write_contigs(tmp_path / "gut.fa.gz", "contig_03", "contig_10")
    variables = {
        "task.cpus": 1,
        "fasta": "gut.fa.gz",
        "prefix": "gut",
        "devices": "cpu",
        "args": "--min-length 1000",
    }
    _run_block("script", variables, tmp_path, environment)
    assert {path for path in _outputs("gut") if not (tmp_path / path).is_file()} == set()
    assert names_in(tmp_path / "gut/viral_contigs.fa.gz") == ["contig_03"]
    assert (tmp_path / "virnuc_home").is_dir()
    settings = json.loads((tmp_path / "gut/run.json").read_text())["settings_from"]
    assert settings.keys() == {"out", "devices", "min-length"}


def test_stub_block_writes_what_the_process_promises(tmp_path: Path, environment: dict[str, str]) -> None:
    _run_block("stub", {"prefix": "gut"}, tmp_path, environment)
    assert sorted(_outputs("gut")) == sorted(f"gut/{file.name}" for file in (tmp_path / "gut").iterdir())
    assert names_in(tmp_path / "gut/viral_contigs.fa.gz") == []


def test_the_version_is_this_one_everywhere(tmp_path: Path, environment: dict[str, str]) -> None:
    (command,) = re.findall(r'eval\("(.+?)"\)', PROCESS)
    done = _run(["bash", "-c", command], tmp_path, environment)
    assert done.stdout.strip() == __version__
    assert re.findall(r"/virnuc:(.+?)--", PROCESS) == [__version__] * 2
    dependencies = yaml.safe_load((MODULE / "environment.yml").read_text())["dependencies"]
    assert dependencies == [f"bioconda::virnuc={__version__}"]


@pytest.mark.slow
def test_nf_core_lint_finds_only_what_needs_nextflow_or_the_network(
    tools: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    repository = _modules_repository(tmp_path / "modules")
    shutil.copytree(MODULE, repository / "modules/nf-core/virnuc/predict")
    _nf_core_offline(tmp_path, environment)
    environment["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(tools), environment["PATH"]])
    command = ["nf-core", "modules", "lint", "virnuc/predict", "--passed", "--plain-text"]
    done = _run(command, repository, environment)
    _, passed, *others = re.split(r"^\[[✔!✗]\] +\d+ Module Tests? \w+$", done.stdout, flags=re.MULTILINE)
    assert _checks(passed) >= MUST_PASS, done.stdout + done.stderr
    assert _checks("".join(others)) <= NOT_TO_BE_HAD, done.stdout


def _checks(report: str) -> set[str]:
    return set(re.findall(r"^virnuc/predict (\w+)$", report, flags=re.MULTILINE))


def _modules_repository(folder: Path) -> Path:
    """Makes a git repository in the layout of nf-core/modules, without modules; its schemas accept anything."""
    (folder / "modules/nf-core").mkdir(parents=True)
    (folder / "tests/config").mkdir(parents=True)
    (folder / ".nf-core.yml").write_text("repository_type: modules\norg_path: nf-core\n")
    for schema in ("meta-schema.json", "environment-schema.json"):
        (folder / "modules" / schema).write_text("{}")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for arguments in (
        ("init", "--quiet", "--initial-branch=master"),
        ("add", "."),
        ("commit", "--quiet", "-m", "made"),
    ):
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)
    return folder


def _nf_core_offline(folder: Path, environment: dict[str, str]) -> None:
    """Lets nf-core clone a made repository in place of nf-core/modules, and find a stand-in for Nextflow."""
    (folder / "bin").mkdir()
    (folder / "bin/nextflow").write_text(NEXTFLOW_OF_NF_CORE)
    (folder / "bin/nextflow").chmod(0o755)
    remote = _modules_repository(folder / "remote")
    environment.update(
        NFCORE_NO_VERSION_CHECK="1",
        XDG_CONFIG_HOME=str(folder / "config"),
        XDG_CACHE_HOME=str(folder / "cache"),
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0=f"url.file://{remote}.insteadOf",
        GIT_CONFIG_VALUE_0="https://github.com/nf-core/modules.git",
    )


@pytest.mark.slow
def test_module_pipeline_and_configuration_parse(
    tools: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    files = [str(MODULE / "main.nf"), str(NEXTFLOW / "main.nf"), str(NEXTFLOW / "nextflow.config")]
    done = _run([tools / "python", "-c", PARSE, *files], tmp_path, environment)
    module, pipeline, configuration = json.loads(done.stdout)
    assert [module[0], pipeline[0]] == ["Module", "Module"]
    assert f'false_name: "quay.io/biocontainers/virnuc:{__version__}' in module[1]
    assert 'name: "VIRNUC_PREDICT"' in pipeline[1]
    assert 'from_module: "./modules/nf-core/virnuc/predict/main"' in pipeline[1]
    assert configuration[0] == "ConfigFileResult"
    assert "publishDir" in configuration[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-stub",), ()], ids=["stub", "real"])
def test_pipeline_in_nextflow(
    options: tuple[str, ...], tools: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    environment["NXF_HOME"] = str(tools.parent / "home")
    started = _run([tools / "nextflow", "-version"], tmp_path, environment)
    if started.returncode:
        pytest.skip("the launcher of Nextflow cannot fetch Nextflow, or there is no Java for it")
    for sample, contig in {"gut": "contig_03", "bees": "contig_08"}.items():
        write_contigs(tmp_path / f"{sample}.fa.gz", contig)
    command = [tools / "nextflow", "run", NEXTFLOW / "main.nf", "--input", f"{tmp_path}/*.fa.gz", *options]
    done = _run(command, tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for sample in ("gut", "bees"):
        assert {path for path in _outputs(sample) if not (tmp_path / "results" / path).is_file()} == set()
    assert f"virnuc: {__version__}" in (tmp_path / "results/versions.yml").read_text()
